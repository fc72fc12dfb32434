"""BEiT and BEiT v2: timm.models.beit.Attention, whose relative positions become the bias.

A bias that the model shares between its layers is added to the layer's own; both reach the core as `Heads.bias`.
B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

from timm.models.beit import Attention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads, split_heads
from vitruvius.surgery.eva import keyless_bias_head_weights, keyless_bias_qkv


class BeitSocket(Socket, Attention):
    """BEiT and BEiT v2, relative positions of its own or shared.

    q and v have biases and k has none, as in EVA.
    """

    family = "beit"

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(keyless_bias_qkv(self, x), 3, self.num_heads)  # each (B, H, N, D)
        bias = self._bias(shared_rel_pos_bias)
        x = self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return keyless_bias_head_weights(self)

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if self.relative_position_bias_table is None:
            return shared
        bias: Tensor = self._get_rel_pos_bias()  # (1, H, N, N)
        return bias if shared is None else bias + shared
