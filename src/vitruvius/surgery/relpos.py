"""ViTs with relative positions: timm.models.vision_transformer_relpos.RelPosAttention.

B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, fused_head_weights, merge_heads, split_heads


class RelPosSocket(Socket, RelPosAttention):
    """ViTs with relative positions, of each block or shared by all."""

    family = "relpos"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        x = self.core(Heads(self.q_norm(q), self.k_norm(k), v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return fused_head_weights(self.qkv, self.proj, self.num_heads)
