"""Checkpoints of KarahanS/Reproduction-Study-KPCA (arXiv:2505.07908): ViTs that standardise q and k."""

from __future__ import annotations

from vitruvius.converters._checkpoint import Checkpoint
from vitruvius.converters._converted import Converted, converters
from vitruvius.converters.kpca import reconstruction


@converters.register("reproduction")
def reproduction(checkpoint: Checkpoint, *, model_name: str | None = None, num_heads: int | None = None) -> Converted:
    """Reproduction-Study-KPCA: standardised q and k; its deit_tiny has 6 heads, its vit_tiny 3.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model and `num_heads` of its layers, by
    default told by shapes and stored arguments.
    """
    return reconstruction(checkpoint, model_name, num_heads)
