"""Elliptical attention: directions in which the values still move count more, softmax(q M kᵀ · scale) v, M diagonal.

Nielsen et al. 2024, "Elliptical Attention", arXiv:2406.13770. M_d = mean over tokens of |v_d − v_d of the layer
before|, divided by its largest entry, as in the authors' code; no gradient flows through it. The first layer has M = I.
B batch, H heads, N tokens, D width of keys and values
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.heads import Context, Heads, Site


@attentions.register("elliptical")
class Elliptical(Stage):
    """Stretch q along directions in which values change from layer to layer (Nielsen et al. 2024, arXiv:2406.13770)."""

    map_text = "the softmax of q, stretched by how values moved since the layer before, with k"
    surrogate = ()  # no gradient flows through M

    def __init__(self, site: Site) -> None:
        super().__init__()
        site.require_self_attention("elliptical")
        if site.key_dim != site.value_dim:
            raise UnsuitableSite(
                f"'elliptical' weighs directions of q by those of v, so both need one width; at {site.name!r} "
                f"({site.family}) keys have {site.key_dim} and values {site.value_dim}. Choose other sites with where=…"
            )

    def forward(self, heads: Heads, context: Context = Context()) -> Heads:  # noqa: B008
        if context.prev_state is None:
            return heads
        return heads._replace(q=heads.q * stretch(heads.v, context.prev_state))

    def next_state(self, heads: Heads, context: Context) -> Tensor:
        return heads.v.detach()


@torch.no_grad()
def stretch(v: Tensor, prev_v: Tensor) -> Tensor:
    """The diagonal of M, (B, H, 1, D), at most 1, for the values of this layer and the one before, (B, H, N, D)."""
    moved = at_least_float32(v - prev_v).abs().mean(-2, keepdim=True)
    largest = moved.amax(-1, keepdim=True)
    return torch.where(largest > 0, moved / largest.clamp(min=torch.finfo(moved.dtype).tiny), 1.0).to(v.dtype)
