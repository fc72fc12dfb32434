"""Standardised queries and keys: each token's q and k get mean 0 and standard deviation 1 over the head width.

What the reconstruction experiments train, arXiv:2406.13762 and arXiv:2505.07908.       D key width
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.attention.symmetric import QUERY_CARRIES
from vitruvius.heads import Heads, Site


@attentions.register("standardised")
class Standardised(Stage):
    """Z-scored q and k, so that q·q = D − 1 for every token (Teo & Nguyen 2024, arXiv:2406.13762)."""

    map_text = "the softmax of standardised q and k"

    def __init__(self, site: Site) -> None:
        super().__init__()
        site.require("standardised", "tokens", "windows", "class", "downsampled")
        if "temperature" in QUERY_CARRIES.get(site.family, ""):
            raise UnsuitableSite(
                f"'standardised' would cancel {QUERY_CARRIES[site.family]} that q carries at {site.name!r} "
                f"({site.family}), and leave it untrained. Choose other sites with where=…"
            )
        if site.key_dim < 2:
            raise UnsuitableSite(f"'standardised' needs keys of width 2 or more; {site.name!r} has {site.key_dim}.")

    def forward(self, heads: Heads) -> Heads:
        return heads._replace(q=standardise(heads.q), k=standardise(heads.k))


def standardise(x: Tensor) -> Tensor:
    """(x − mean) / unbiased standard deviation over the last axis of `x`; a constant row becomes zeros."""
    wide = at_least_float32(x)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    constant = variance <= (torch.finfo(wide.dtype).eps * mean).square()  # nothing but rounding varies
    return ((wide - mean) * variance.masked_fill(constant, torch.inf).rsqrt()).to(x.dtype)
