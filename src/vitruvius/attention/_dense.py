"""Kernels that write their weights out: one (N, M) matrix a head, for formulas that no fused kernel computes.

B batch, H heads, N queries, M keys, E value width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius.attention._core import Kernel
from vitruvius.heads import Heads

HIDDEN = -99.0  # a bias below this hides a pair: masks write -inf, Swin's shifted windows -100


class DenseKernel(Kernel):
    """A kernel given by its weights: a subclass defines `map`, the output is their product with the values."""

    def map(self, heads: Heads) -> Tensor:
        """The weights, (B, H, N, M)."""
        raise NotImplementedError

    def forward(self, heads: Heads) -> Tensor:
        return F.dropout(self.map(heads), heads.dropout) @ heads.v


def scores(heads: Heads) -> Tensor:
    """q kᵀ · scale + bias, (B, H, N, M), in float32 at least."""
    logits = at_least_float32((heads.q * heads.scale) @ heads.k.mT)
    return logits if heads.bias is None else logits + heads.bias


def hidden(heads: Heads) -> Tensor | None:
    """True where the bias hides a pair; broadcasts to (B, H, N, M). None without a bias."""
    return None if heads.bias is None else heads.bias < HIDDEN


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision widened."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x
