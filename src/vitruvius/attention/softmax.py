"""Softmax attention, the reference kernel: softmax(q kᵀ · scale + bias) v, by PyTorch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius.attention._core import Kernel, attention_map, attentions
from vitruvius.heads import Heads, Site

__all__ = ["Softmax", "attend", "attention_map", "matched", "needs_another_backend"]

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@attentions.register("softmax")
class Softmax(Kernel):
    """Plain scaled dot-product attention, what timm's models do (Vaswani et al. 2017, arXiv:1706.03762)."""

    shows = "softmax(q kᵀ)"

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        return attend(heads)

    def last_softmax(self, heads: Heads) -> Heads:
        return heads


def attend(heads: Heads) -> Tensor:
    """softmax(q kᵀ · scale + bias) v of shape (B, H, N, E). `heads` may have a bias and dropout."""
    if needs_another_backend(heads):
        with sdpa_kernel(WITHOUT_CUDNN):
            out = _attend(heads)
    else:
        out = _attend(heads)
    if out.is_cuda and out.dtype.itemsize == 2 and out.requires_grad:
        return matched(out)
    return out


def _attend(heads: Heads) -> Tensor:
    q, k, v, bias, scale, dropout = heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def needs_another_backend(heads: Heads) -> bool:
    """Whether cuDNN's backward pass might answer NaN.

    With a mask, and 64 keys in its last tile of 128, it scores the empty half of that tile 0 instead of −∞; where all
    scores of a query are below about −88, the gradient of q is NaN (PyTorch issue 196678, torch 2.11 and later).
    Swin v2 with windows of 8 × 8 has such lengths, 4 × 4 patches of CIFAR under a mask too.

    `heads` are about to be attended; only in half precision, on a GPU, with a bias and a gradient are they at risk.
    """
    k, bias = heads.k, heads.bias
    if bias is None or k.shape[-2] % 128 != 64:
        return False
    return k.is_cuda and k.dtype.itemsize == 2 and torch.is_grad_enabled()


def matched(out: Tensor) -> Tensor:
    """`out` (B, H, N, E), whose gradient will come back in its own memory layout.

    PyTorch (2.11) keeps cuDNN's backward plans by the layouts of q, k and v and not by that of the gradient: a second
    layout meets the first one's plan, and the gradients of q, k and v are wrong without a word. `rpc` hands its
    iterations gradients of several layouts. See docs/speed.md.
    """
    matching: Tensor = _Matching.apply(out)
    return matching


class _Matching(torch.autograd.Function):
    """The identity; on the backward pass, the layout of `out`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.rows_outside = out.transpose(1, 2).is_contiguous()  # memory is (B, N, H, E)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        if ctx.rows_outside:
            return grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        return grad_out.contiguous()
