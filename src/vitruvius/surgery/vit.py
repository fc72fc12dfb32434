"""The attention of ViT, DeiT and their many relatives: timm.layers.Attention.

B batch, H heads, N tokens, D head width, C model width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, fused_head_weights, gate_of, is_plain_linear, merge_heads, split_heads


class ViTSocket(Socket, Attention):
    """ViT and DeiT, with q/k-norm, scale-norm and gates."""

    family = "vit"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.leave(self.core(self.enter(x, attn_mask, is_causal), x), x)

    def enter(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Heads:
        """What comes before the core, for tokens (B, N, C)."""
        if not self.reads_queries() and is_plain_linear(self.qkv):
            return self._without_queries(x, attn_mask, is_causal)
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        bias = resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal)
        return Heads(self.q_norm(q), self.k_norm(k), v, bias, self.scale, self.dropout_now())

    def _without_queries(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Heads:
        """The same with the keys in place of queries that nobody looks at, which are not computed."""
        skipped = self.qkv.out_features // 3
        bias = None if self.qkv.bias is None else self.qkv.bias[skipped:]
        k, v = split_heads(F.linear(x, self.qkv.weight[skipped:], bias), 2, self.num_heads)
        k = self.k_norm(k)
        return Heads(
            k, k, v, resolve_self_attn_mask(x.shape[1], k, attn_mask, is_causal), self.scale, self.dropout_now()
        )

    def leave(self, out: Tensor, x: Tensor) -> Tensor:
        """What comes behind the core: its output (B, H, N, E), and the tokens that came in."""
        out = self.norm(merge_heads(out))
        gate = gate_of(self, x)
        return self.proj_drop(self.proj(out if gate is None else out * gate))

    def head_weights(self: Any) -> HeadWeights:
        return fused_head_weights(self.qkv, self.proj, self.num_heads)

    def width(self: Any) -> int:
        return int(self.qkv.in_features)  # also where the projection makes no queries
