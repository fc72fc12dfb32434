"""LeViT, linear and convolutional: timm.models.levit.Attention and AttentionDownsample.

B batch, H heads, N queries, M keys, D key width, E value width (twice or four times D).
Upstream caches the biases in eval mode; here they are indexed afresh, so they follow the weights.
"""

from __future__ import annotations

from typing import Any

from timm.models.levit import Attention, AttentionDownsample
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, columns, merge_heads, rows


class LevitSocket(Socket, Attention):
    """LeViT: values wider than keys, biases by distance."""

    family = "levit"

    def forward(self, x: Tensor) -> Tensor:
        widths = [self.key_dim, self.key_dim, self.val_dim]
        q, k, v = _by_head(self, self.qkv(x)).split(widths, dim=-1)  # (B, H, N, D), …, (B, H, N, E)
        bias = self.attention_biases[None, :, self.attention_bias_idxs]  # (1, H, N, N)
        out = self.core(Heads(q, k, v, bias, self.scale, 0.0))
        if self.use_conv:
            return self.proj(_as_image(out, x.shape[2], x.shape[3]))
        return self.proj(merge_heads(out))

    def head_weights(self: Any) -> HeadWeights:
        widths = [self.key_dim, self.key_dim, self.val_dim]
        q, k, v = rows(self.qkv.linear, self.num_heads, sum(widths)).split(widths, dim=1)
        return HeadWeights(q, k, v, columns(self.proj.ln.linear, self.num_heads, self.val_dim))

    def grid(self: Any) -> tuple[int, int] | None:
        return tuple(self.resolution)


class LevitDownsampleSocket(Socket, AttentionDownsample):
    """LeViT between stages: fewer queries than keys."""

    family = "levit_downsample"
    attends = "downsampled"

    def forward(self, x: Tensor) -> Tensor:
        k, v = _by_head(self, self.kv(x)).split([self.key_dim, self.val_dim], dim=-1)  # (B, H, M, D or E)
        q = _by_head(self, self.q(x))  # (B, H, N, D)
        bias = self.attention_biases[None, :, self.attention_bias_idxs]  # (1, H, N, M)
        out = self.core(Heads(q, k, v, bias, self.scale, 0.0))
        if self.use_conv:
            rows, columns = (x.shape[2] - 1) // self.stride + 1, (x.shape[3] - 1) // self.stride + 1
            return self.proj(_as_image(out, rows, columns))
        return self.proj(merge_heads(out))

    def head_weights(self: Any) -> HeadWeights:
        q = rows(self.q.ln.linear, self.num_heads, self.key_dim)
        kv = rows(self.kv.linear, self.num_heads, self.key_dim + self.val_dim)
        k, v = kv.split([self.key_dim, self.val_dim], dim=1)
        return HeadWeights(q, k, v, columns(self.proj.ln.linear, self.num_heads, self.val_dim))


def _by_head(module: Any, x: Tensor) -> Tensor:
    """(B, N, H·D), or an image (B, H·D, rows, columns), → (B, H, N, D)."""
    if module.use_conv:
        return x.unflatten(1, (module.num_heads, -1)).flatten(3).mT
    return x.unflatten(2, (module.num_heads, -1)).transpose(1, 2)


def _as_image(x: Tensor, rows: int, columns: int) -> Tensor:
    """(B, H, N, E) → (B, H·E, rows, columns)."""
    return x.mT.flatten(1, 2).unflatten(2, (rows, columns))
