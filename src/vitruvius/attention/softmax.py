"""Softmax attention, the reference kernel: softmax(q kᵀ · scale + bias) v.

By PyTorch's fused kernel, or on a CPU in bfloat16 by plain matrix products, which are 2 to 9 times faster there; on AMD
processors in float32 too, head by head, for a gradient.
B batch, H heads, N queries, M keys, D key width, E value width
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius._linear import onednn_is_faster, product
from vitruvius.attention.base import Kernel, attentions
from vitruvius.heads import Heads, Site

MOST_KEYS = 1536  # beyond, products are no faster than the fused kernel (docs/speed.md)
MOST_SCORES = 2**27  # entries of (B, H, N, M) that products may write: 256 MB
SAVED_KEYS = range(160, 513)  # below, calls take as long as products; beyond, memory grows by more than time falls
MOST_SAVED_SCORES = 2**24  # entries of (B, H, N, M) that `HeadByHead` may keep for the backward pass: 64 MB
MOST_THREADS = 2  # which one head keeps busy
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@attentions.register("softmax")
class Softmax(Kernel):
    """Plain scaled dot-product attention, what timm's models do (Vaswani et al. 2017, arXiv:1706.03762)."""

    map_text = "softmax(q kᵀ)"

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        return attend(heads)

    def last_softmax(self, heads: Heads) -> Heads:
        return heads


def attend(heads: Heads) -> Tensor:
    """softmax(q kᵀ · scale + bias) v of shape (B, H, N, E). `heads` may have a bias and dropout."""
    if products_are_faster(heads):
        return by_products(heads)
    if gradient_is_faster_head_by_head(heads):
        return HeadByHead.apply(heads.q, heads.k, heads.v, heads.scale)
    if needs_another_backend(heads):
        with sdpa_kernel(WITHOUT_CUDNN):
            out = _attend(heads)
    else:
        out = _attend(heads)
    return matched(out) if out.is_cuda and out.dtype.itemsize == 2 and out.requires_grad else out


def _attend(heads: Heads) -> Tensor:
    q, k, v, bias, scale, dropout = heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def by_products(heads: Heads) -> Tensor:
    """softmax(q kᵀ · scale + bias) v, (B, H, N, E), with the scores written out in the dtype of `heads`."""
    q, k, v, bias, scale, dropout = heads
    B, H, N, M = *q.shape[:-1], k.shape[-2]
    scores = torch.baddbmm(q.new_empty(()), q.reshape(B * H, N, -1), k.reshape(B * H, M, -1).mT, beta=0, alpha=scale)
    scores = scores.view(B, H, N, M)
    if bias is None:
        weights = scores.softmax(-1)
    else:  # a query whose every key is hidden gets 0, as from the fused kernel, and not NaN
        weights = torch._safe_softmax(scores + bias.to(scores.dtype), -1)
    return F.dropout(weights, dropout) @ v


def products_are_faster(heads: Heads) -> bool:
    """Whether `by_products` beats PyTorch's fused kernel for these heads, as measured with and without gradients."""
    q, k = heads.q, heads.k
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or q.dim() != 4 or k.shape[:2] != q.shape[:2]:
        return False
    if torch.compiler.is_exporting() or not multiplies_bfloat16():
        return False
    return k.shape[-2] <= MOST_KEYS and q.shape[:-1].numel() * k.shape[-2] <= MOST_SCORES


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16; elsewhere PyTorch emulates them, slowly."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16", "sve_bf16"))


def gradient_is_faster_head_by_head(heads: Heads) -> bool:
    """Whether `HeadByHead` gives the gradient of these `heads` faster than PyTorch's fused kernel does, as measured."""
    q, k, v, bias, _, dropout = heads
    if bias is not None or dropout or not gradient_by_hand(q, k, v):
        return False
    if k.device.type != "cpu" or {q.dtype, k.dtype, v.dtype} != {torch.float32} or q.dim() != 4 or v.dim() != 4:
        return False
    fused = torch._C._get_flash_sdp_enabled()  # not within sdpa_kernel, where a second gradient is wanted
    if not fused or torch.get_num_threads() > MOST_THREADS or not onednn_is_faster():
        return False
    scores = q.shape[:-1].numel() * k.shape[-2]
    return q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[-2] in SAVED_KEYS and scores <= MOST_SAVED_SCORES


def gradient_by_hand(*tensors: Tensor) -> bool:
    """Whether a gradient of `tensors` is wanted in a way that an autograd function can give.

    torch.compile fuses plain operations into less memory by itself, and Dynamo of torch 2.11 returns no gradient,
    without a word, from a function that writes its outputs in place; the transforms of torch.func want rules for each.
    """
    as_it_is_written = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    return as_it_is_written and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class HeadByHead(torch.autograd.Function):
    """softmax(q kᵀ · scale) v with its gradient: six products in oneDNN, where PyTorch's kernel makes seven in MKL.

    Where the keys are the queries, five. Head by head, as a cache holds the scores of one.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        weights, out = [], []
        for query, key, value in zip(_by_head(q), _by_head(k), _by_head(v), strict=True):
            scores = product(query * scale, key)
            weights.append(torch.softmax(scores, -1, out=scores))
            out.append(product(weights[-1], value.mT))
        ctx.save_for_backward(q, k, v, *weights)
        ctx.scale, ctx.keys_ask = scale, q is k
        return torch.stack(out).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    @once_differentiable  # as the fused kernel is
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        q, k, v, *weights = ctx.saved_tensors
        found: list[list[Tensor]] = [[], [], []]
        for query, key, value, kept, asked in zip(
            _by_head(q), _by_head(k), _by_head(v), weights, _by_head(grad), strict=True
        ):
            scores = torch._softmax_backward_data(product(asked, value), kept, -1, kept.dtype).mul_(ctx.scale)
            if ctx.keys_ask:
                found[1].append(product(scores + scores.mT, key.mT))
            else:
                found[0].append(product(scores, key.mT))
                found[1].append(product(scores.mT, query.mT))
            found[2].append(product(kept.mT, asked.mT))
        to_q = torch.stack(found[0]).view(q.shape) if found[0] else None
        return to_q, torch.stack(found[1]).view(k.shape), torch.stack(found[2]).view(v.shape), None


def _by_head(x: Tensor) -> Tensor:
    """(B · H, N, D) of (B, H, N, D) with its rows in order: of others oneDNN takes a hundred times as long."""
    return x.flatten(0, 1).contiguous()


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
    return _Matching.apply(out)


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
