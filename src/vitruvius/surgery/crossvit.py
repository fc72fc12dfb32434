"""CrossViT: timm.models.crossvit.CrossAttention, the class token of one branch looking at the other's tokens.

B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

from timm.models.crossvit import CrossAttention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads, separate_head_weights, split_heads


class CrossSocket(Socket, CrossAttention):
    """CrossViT: one branch's class token looks at the other branch."""

    family = "crossvit"
    attends = "class"

    def forward(self, x: Tensor) -> Tensor:
        (q,) = split_heads(self.wq(x[:, :1]), 1, self.num_heads)  # (B, H, 1, D)
        (k,) = split_heads(self.wk(x), 1, self.num_heads)  # (B, H, N, D)
        (v,) = split_heads(self.wv(x), 1, self.num_heads)
        x = self.core(Heads(q, k, v, None, self.scale, self.dropout_now()))
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.wq, self.wk, self.wv, self.proj, self.num_heads)
