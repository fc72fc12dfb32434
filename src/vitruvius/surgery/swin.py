"""Swin and Swin v2, Microsoft's and Christoph Reich's: relative positions and the shift's mask become the bias.

The second version's cosine attention has its temperature in q, and positions from a small network.
B batch of windows, W windows an image, H heads, N tokens of a window, D head width.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch.nn.functional as F
from timm.models import swin_transformer, swin_transformer_v2
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from torch import Tensor

from vitruvius.heads import Attends, Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads, split_heads
from vitruvius.surgery.eva import keyless_bias_head_weights, keyless_bias_qkv

MAX_LOG_TEMPERATURE = math.log(1.0 / 0.01)


class _Windows:
    """What all three attend over."""

    attends: ClassVar[Attends] = "windows"

    def grid(self: Any) -> tuple[int, int] | None:
        return tuple(self.window_size)


class SwinSocket(_Windows, Socket, swin_transformer.WindowAttention):
    """Swin, plain and shifted windows."""

    family = "swin"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        bias = windowed(self._get_rel_pos_bias(), mask, x.shape[0])
        x = self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))


class SwinV2Socket(_Windows, Socket, swin_transformer_v2.WindowAttention):
    """Swin v2: cosine attention in windows."""

    family = "swin_v2"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(keyless_bias_qkv(self, x), 3, self.num_heads)  # each (B, H, N, D)
        q, k = cosine(q, k, v, self.logit_scale)
        bias = windowed(self._positions(), mask, x.shape[0])
        x = self.core(Heads(q, k, v, bias, 1.0, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return keyless_bias_head_weights(self)

    def _positions(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        positions = table[self.relative_position_index].movedim(-1, 0)  # (H, N, N)
        return 16 * positions.sigmoid()[None]


class SwinV2CrSocket(_Windows, Socket, WindowMultiHeadAttention):
    """Swin v2 as written by Christoph Reich."""

    family = "swin_v2_cr"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        q, k = cosine(q, k, v, self.logit_scale.view(-1, 1, 1))
        bias = windowed(self._relative_positional_encodings(), mask, x.shape[0])
        x = self.core(Heads(q, k, v, bias, 1.0, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))


def windowed(positions: Tensor, mask: Tensor | None, num_windows: int) -> Tensor:
    """Relative positions (1, H, N, N), plus each window's mask (W, N, N) where there is one: (1 or B, H, N, N)."""
    return positions if mask is None else positions + mask.repeat(num_windows // len(mask), 1, 1)[:, None]


def cosine(q: Tensor, k: Tensor, v: Tensor, log_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Directions of q and k (B, H, N, D) in the dtype of v, the temperature of each head (H, 1, 1) put into q."""
    temperature = log_temperature.clamp(max=MAX_LOG_TEMPERATURE).exp()
    return (F.normalize(q, dim=-1) * temperature).type_as(v), F.normalize(k, dim=-1).type_as(v)
