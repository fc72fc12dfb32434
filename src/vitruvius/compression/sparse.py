"""Inference that skips what a mask removes: `mask → softmax` becomes `sparse_softmax`, with equal results."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.attention.base import Core
from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.mask import Mask
from vitruvius.attention.softmax import Softmax
from vitruvius.attention.sparse_softmax import SparseSoftmax
from vitruvius.heads import Site
from vitruvius.surgery import survey
from vitruvius.surgery.base import cores_of, inner
from vitruvius.surgery.sites import Where, match


def use_sparse(model: nn.Module, where: Where = "*", *, block: int | None = None) -> nn.Module:
    """Replace `mask → softmax` by `sparse_softmax` at the matching sites that have it; in place.

    Every site is checked first. The pattern moves along; a checkpoint saved afterwards names it under the new part.

    `model` is rewired; `where` is a glob over site names, or several (default: all); `block` is the number of queries
    that are computed together, by default the one of 16, 32 and 64 that computes least.
    """
    cores = cores_of(model)
    masked = [name for name, core in cores.items() if _ends_in_a_mask(*core.children())]
    if not masked:
        held = sorted({core.describe() for core in cores.values()}) or ["upstream's attention"]
        raise SurgeryError(
            f"{type(inner(model)).__name__} has no site with mask → softmax to make sparse; its sites hold "
            f"{', '.join(held)}."
        )
    sites = survey(model)
    made = {name: _sparse_core(cores[name], sites[name], block) for name in match(model, masked, where)}
    for name, core in made.items():
        cast(Any, inner(model).get_submodule(name)).core = core
    return model


def _ends_in_a_mask(*parts: nn.Module) -> bool:
    """Whether a mask stands right before the softmax."""
    return len(parts) > 1 and isinstance(parts[-2], Mask) and isinstance(parts[-1], Softmax)


def _sparse_core(core: Core, site: Site, block: int | None) -> Core:
    *stages, (_, mask), _ = core.parts.items()
    assert isinstance(mask, Mask)
    kernel = SparseSoftmax(site, keep=mask.keep, block=block)
    made = Core([*stages, ("sparse_softmax", kernel)], site)
    return made.to(mask.keep.device).train(core.training)


def masks_in(model: nn.Module) -> tuple[dict[str, Tensor], list[float]]:
    """The patterns that the cores of `model` hold, by site, and the rank of each auto-encoder over its heads."""
    keep: dict[str, Tensor] = {}
    ratios: list[float] = []
    for name, core in cores_of(model).items():
        for part in core.modules():
            if isinstance(part, Mask | SparseSoftmax):
                keep[name] = part.keep.cpu()
            if isinstance(part, LowRank):
                encoder = getattr(part, part.tensors[0])[0]
                ratios.append(encoder.out_features / encoder.in_features)
    return keep, ratios
