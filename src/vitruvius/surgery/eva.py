"""EVA, EVA-02, DINOv3, BEiT and BEiT v2: one projection with a bias for q and v but none for k.

B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import beit
from timm.models.eva import EvaAttention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, biases, fused_head_weights, merge_heads, split_heads
from vitruvius.surgery.rope import Rotary


class EvaSocket(Rotary, Socket, EvaAttention):
    """EVA, EVA-02 and DINOv3: rotary positions, no bias on the keys."""

    family = "eva"

    def _fused(self, x: Tensor) -> Tensor:
        return keyless_bias_qkv(self, x)

    def head_weights(self: Any) -> HeadWeights:
        return keyless_bias_head_weights(self) if self.qkv is not None else Rotary.head_weights(self)


class BeitSocket(Socket, beit.Attention):
    """BEiT and BEiT v2, relative positions of its own or shared."""

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
