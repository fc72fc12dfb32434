"""ViTs with rotary position embedding: timm.layers.AttentionRope, grouped queries included.

B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import (
    Socket,
    fused_head_weights,
    gate_of,
    merge_heads,
    separate_head_weights,
    split_heads,
)


class Rotary:
    """Attention with rotary positions, one projection or three, several heads to a key, norms and a gate."""

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        gate = gate_of(self, x)
        if self.qkv is not None:
            q, k, v = split_heads(self._fused(x), 3, self.num_heads)  # each (B, H, N, D)
        else:
            made = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in made)
        q, k = rotate(self, self.q_norm(q), self.k_norm(k), v, rope)
        shared = 1 if self.qkv is not None else self.q_proj.out_features // self.k_proj.out_features
        if shared > 1:  # every query head gets a copy of the key and value head that it shares
            k, v = (y.repeat_interleave(shared, dim=1) for y in (k, v))
        bias = resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal)
        x = self.norm(merge_heads(self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)))
        return self.proj_drop(self.proj(x if gate is None else x * gate))

    def _fused(self: Any, x: Tensor) -> Tensor:
        """What the one projection makes of tokens (B, N, C), (B, N, 3·H·D)."""
        return self.qkv(x)

    def head_weights(self: Any) -> HeadWeights:
        if self.qkv is not None:
            return fused_head_weights(self.qkv, self.proj, self.num_heads)
        if self.k_proj.weight.shape[0] != self.q_proj.weight.shape[0]:
            raise UnsuitableSite("several heads share one key projection (grouped queries).")
        return separate_head_weights(self.q_proj, self.k_proj, self.v_proj, self.proj, self.num_heads)

    def width(self: Any) -> int:
        return int((self.q_proj if self.qkv is None else self.qkv).weight.shape[1])


class RopeSocket(Rotary, Socket, AttentionRope):
    """ViTs with rotary positions, fused or separate projections, grouped queries."""

    family = "rope"


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn q and k (B, H, N, D) by the sines and cosines of the patches, in the dtype of v; prefix tokens have none."""
    if rope is None:
        return q, k
    prefix = module.num_prefix_tokens
    turned = (apply_rot_embed_cat(x[:, :, prefix:], rope, half=module.rotate_half) for x in (q, k))
    q, k = (torch.cat([x[:, :, :prefix], t], dim=2).type_as(v) for x, t in zip((q, k), turned, strict=True))
    return q, k
