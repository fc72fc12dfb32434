"""Differential ViTs: timm.layers.DiffAttention, whose heads look twice and subtract (arXiv:2410.05258).

A head is two softmaxes over one set of values; the core sees both, so H here is twice upstream's number of heads.
A core of plain softmax gives upstream's answer; λ, the norm of the difference and its factor stay upstream's.
B batch, H heads of the core, N tokens, D width of a query, C model width.
"""

from __future__ import annotations

from typing import Any

from timm.layers import DiffAttention
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads


class DifferentialSocket(Socket, DiffAttention):
    """ViTs with differential attention: two softmaxes a head, one set of values."""

    family = "differential"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=2)
        q, k = (y.unflatten(2, (2 * self.num_heads, -1)).transpose(1, 2) for y in (q, k))  # (B, H, N, D)
        v = v.unflatten(2, (self.num_heads, -1)).transpose(1, 2).repeat_interleave(2, dim=1)  # (B, H, N, 2D)
        bias = resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal)
        out = self.core(Heads(self.q_norm(q), self.k_norm(k), v, bias, self.scale, self.dropout_now()), x)
        first, second = out.unflatten(1, (self.num_heads, 2)).unbind(2)
        x = self.sub_norm(first - self._compute_lambda().type_as(q) * second) * (1 - self.lambda_init)
        return self.proj_drop(self.proj(self.norm(merge_heads(x))))

    def head_weights(self: Any) -> HeadWeights:
        raise UnsuitableSite("two heads share one value projection (differential attention).")

    def width(self: Any) -> int:
        return int(self.qkv.weight.shape[1])
