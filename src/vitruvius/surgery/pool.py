"""Attention pooling, as in SigLIP: timm.layers.AttentionPoolLatent, learned queries looking at all tokens.

B batch, H heads, L latent queries, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

from timm.layers import AttentionPoolLatent
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor, nn

from vitruvius._errors import UnsuitableSite
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, biases, columns, fused_biases, merge_heads, rows, split_heads


class PoolSocket(Socket, AttentionPoolLatent):
    """Pooling by learned queries, at the end of SigLIP and others."""

    family = "pool"
    attends = "class"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x = x + self.pos_embed[None].type_as(x)
        (q,) = split_heads(self.q(self.latent.expand(x.shape[0], -1, -1)), 1, self.num_heads)  # (B, H, L, D)
        k, v = split_heads(self.kv(x), 2, self.num_heads)  # each (B, H, N, D)
        bias = resolve_self_attn_mask(x.shape[1], q, attn_mask)
        x = self.core(Heads(self.q_norm(q), self.k_norm(k), v, bias, self.scale, 0.0))
        x = self.proj_drop(self.proj(merge_heads(x)))
        if self.mlp is not None:
            x = x + self.mlp(self.norm(x))
        if self.pool == "token":
            return x[:, 0]
        if self.pool == "avg":
            return x.mean(1)
        return x

    def head_weights(self: Any) -> HeadWeights:
        if isinstance(self.q, nn.Identity) or isinstance(self.proj, nn.Identity):
            raise UnsuitableSite("its queries or its outputs have no projection.")
        k, v = rows(self.kv, 2, self.num_heads, self.head_dim)
        k_bias, v_bias = fused_biases(self.kv.bias, 2, self.num_heads, self.head_dim)
        q = rows(self.q, self.num_heads, self.head_dim)
        q_bias = biases(self.q.bias, self.num_heads, self.head_dim)
        return HeadWeights(q, k, v, columns(self.proj, self.num_heads, self.head_dim), q_bias, k_bias, v_bias)

    def width(self: Any) -> int:
        return int(self.kv.weight.shape[1])
