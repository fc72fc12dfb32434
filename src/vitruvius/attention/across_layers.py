"""Attention that knows the values of other layers: those of the first, or how they moved since the layer before.

value_residual  (1 − share) v + share v₁, v₁ those of the first layer (Zhou et al. 2025, "Value Residual Learning",
                arXiv:2410.17897, ResFormer); the published code takes half of each
elliptical      softmax(q M kᵀ · scale) v, M diagonal (Nielsen et al. 2024, arXiv:2406.13770): M_d = mean over tokens of
                |v_d − v_d of the layer before|, divided by its largest entry, as in the authors' code; no gradient
                flows through it. The first layer has M = I.

B batch, H heads, N tokens, D width of keys and values
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.heads import Context, Heads, Site


@attentions.register("value_residual")
class ValueResidual(Stage):
    """Mix the values with those of the first layer that has this stage (Zhou et al. 2025, arXiv:2410.17897).

    `share` of the first layer's values: 0.5 is the published one, 0 is softmax; learned=True makes it a number that
    each layer learns, beginning there.
    """

    map_text = "the softmax, over the mixed values"
    adds_values = True
    share: Tensor  # (1)

    def __init__(self, site: Site, *, share: float = 0.5, learned: bool = False) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ConfigError(f"'value_residual' got share={share}; it is a share of the values, from 0 to 1.")
        site.require_self_attention("value_residual")
        number = torch.full((1,), float(share))
        if learned:
            self.register_parameter("share", nn.Parameter(number))
        else:
            self.register_buffer("share", number, persistent=False)

    def forward(self, heads: Heads, context: Context = Context()) -> Heads:  # noqa: B008
        if context.prev_state is None:
            return heads
        return heads._replace(v=torch.lerp(heads.v, context.prev_state, self.share.to(heads.v.dtype)))

    def next_state(self, heads: Heads, context: Context) -> Tensor:
        return heads.v if context.prev_state is None else context.prev_state


@attentions.register("elliptical")
class Elliptical(Stage):
    """Stretch q along directions in which values change from layer to layer (Nielsen et al. 2024, arXiv:2406.13770)."""

    map_text = "the softmax of q, stretched by how values moved since the layer before, with k"
    surrogate = ()  # no gradient flows through M

    def __init__(self, site: Site) -> None:
        super().__init__()
        site.require_self_attention("elliptical")
        if site.key_dim != site.value_dim:
            raise site.unsuitable("elliptical", "weighs directions of q by those of v, so both need one width")

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
