"""Softmax attention, the reference kernel: softmax(q kᵀ · scale + bias) v, by PyTorch's fused kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitruvius.attention._core import Kernel, attentions
from vitruvius.heads import Heads, Site


@attentions.register("softmax")
class Softmax(Kernel):
    """Plain scaled dot-product attention, what timm's models do."""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        return attend(heads)


def attend(heads: Heads) -> Tensor:
    """softmax(q kᵀ · scale + bias) v of shape (B, H, N, E)."""
    q, k, v, bias, scale, dropout = heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def attention_map(heads: Heads) -> Tensor:
    """The map itself, (B, H, N, M): for looking at, never on the way to an output."""
    logits = (heads.q * heads.scale) @ heads.k.mT
    if heads.bias is not None:
        logits = logits + heads.bias
    return logits.softmax(-1)
