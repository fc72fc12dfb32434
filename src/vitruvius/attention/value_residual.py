"""Value residual: every layer attends over its own values and those of the first layer, (1 − share) v + share v₁.

Zhou et al. 2025, "Value Residual Learning", arXiv:2410.17897 (ResFormer); the published code takes half of each.
B batch, H heads, N tokens, E value width
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, attentions
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
