"""EVA, EVA-02, DINOv3, BEiT and BEiT v2: one projection with a bias for q and v but none for k.

B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import resolve_self_attn_mask
from timm.models import beit
from timm.models.eva import EvaAttention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import (
    Socket,
    biases,
    fused_head_weights,
    gate_of,
    merge_heads,
    separate_head_weights,
    split_heads,
)
from vitruvius.surgery.rope import rotate


class EvaSocket(Socket, EvaAttention):
    """EVA, EVA-02 and DINOv3: rotary positions, no bias on the keys."""

    family = "eva"

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        gate = gate_of(self, x)
        q, k, v = self._project(x)
        q, k = rotate(self, self.q_norm(q), self.k_norm(k), v, rope)
        bias = resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal)
        x = self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)
        x = self.norm(merge_heads(x))
        return self.proj_drop(self.proj(x if gate is None else x * gate))

    def head_weights(self: Any) -> HeadWeights:
        if self.qkv is None:
            return separate_head_weights(self.q_proj, self.k_proj, self.v_proj, self.proj, self.num_heads)
        return keyless_bias_head_weights(self)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is not None:
            return split_heads(keyless_bias_qkv(self, x), 3, self.num_heads)
        return tuple(
            p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )


class BeitSocket(Socket, beit.Attention):
    """BEiT and BEiT v2, relative positions of its own or shared.

    q and v have biases and k has none, as in EVA.
    """

    family = "beit"

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(keyless_bias_qkv(self, x), 3, self.num_heads)  # each (B, H, N, D)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()  # (1, H, N, N)
            bias = own if bias is None else own + bias
        x = self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return keyless_bias_head_weights(self)


def keyless_bias_qkv(module: Any, x: Tensor) -> Tensor:
    """One projection to q, k and v whose bias is made of two parameters and zeros for k (EVA, BEiT, Swin v2)."""
    if module.q_bias is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    return module.qkv(x) + bias if module.qkv_bias_separate else F.linear(x, module.qkv.weight, bias)


def keyless_bias_head_weights(module: Any) -> HeadWeights:
    """Views for the same; the zeros for k are not a parameter, so k has no bias here."""
    views = fused_head_weights(module.qkv, module.proj, module.num_heads)
    shape = views.q.shape[:2]
    return views._replace(q_bias=biases(module.q_bias, *shape), v_bias=biases(module.v_bias, *shape))
