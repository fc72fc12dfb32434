"""Head similarity: do the heads of a layer look at the same keys, and say the same?

1 for heads that are copies of each other; linear CKA: Kornblith et al. 2019, arXiv:1905.00414.
B batch, H heads, N queries, E value width
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("head_similarity")
def head_similarity(heads: Heads, site: Site, attended: Attended | None = None) -> Statistics:
    """Of each head with the others, on average: cosine of attention maps, linear CKA of outputs."""
    if site.num_heads < 2:
        raise UnsuitableSite(f"'head_similarity' needs two heads or more; {site.name!r} has one.")
    attended = attended or Attended(precise(heads))
    weights = attended.map()
    maps = weights.flatten(2) / torch.linalg.matrix_norm(weights)[..., None]
    similarity = {"maps": others(maps @ maps.mT)}
    if heads.q.shape[-2] > 1:
        similarity["outputs"] = others(_cka(attended.output()))
    return similarity


def others(table: Tensor) -> Tensor:
    """Mean of each row of (…, H, H) without the diagonal, (…, H)."""
    return (table.sum(-1) - table.diagonal(dim1=-2, dim2=-1)) / (table.shape[-1] - 1)


def _cka(x: Tensor) -> Tensor:
    """Linear CKA between the heads of (B, H, N, E), (B, H, H): ‖X_hᵀ X_i‖² / (‖X_hᵀ X_h‖ ‖X_iᵀ X_i‖)."""
    x = x - x.mean(-2, keepdim=True)
    rows = [(each[:, None].mT @ x).square().sum((-2, -1)) for each in x.unbind(1)]
    products = torch.stack(rows, 1)
    size = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (size[..., :, None] * size[..., None, :])
