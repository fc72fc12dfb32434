"""Swin: timm.models.swin_transformer.WindowAttention; relative positions and the shift's mask become the bias.

B batch of windows, W windows an image, H heads, N tokens of a window, D head width.
"""

from __future__ import annotations

from typing import Any

from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, fused_head_weights, merge_heads, split_heads


class SwinSocket(Socket, WindowAttention):
    """Swin, plain and shifted windows."""

    family = "swin"
    attends = "windows"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        bias = windowed(self._get_rel_pos_bias(), mask, x.shape[0])
        x = self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return fused_head_weights(self.qkv, self.proj, self.num_heads)

    def grid(self: Any) -> tuple[int, int] | None:
        return tuple(self.window_size)


def windowed(positions: Tensor, mask: Tensor | None, num_windows: int) -> Tensor:
    """Relative positions (1, H, N, N), plus each window's mask (W, N, N) where there is one: (1 or B, H, N, N)."""
    if mask is None:
        return positions
    return positions + mask.repeat(num_windows // len(mask), 1, 1)[:, None]
