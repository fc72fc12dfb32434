"""MaxViT and CoAtNet: timm.models.maxxvit.AttentionCl in windows and grids, Attention2d over feature maps.

B batch, H heads, N tokens, D head width, C model width.
"""

from __future__ import annotations

from typing import Any

from timm.models.maxxvit import Attention2d, AttentionCl
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, columns, fused_biases, fused_head_weights, merge_heads, rows, split_heads


class _Projected:
    """What both share: one projection, heads or kinds first as the model was built, and relative positions."""

    def attend(self: Any, qkv: Tensor, shared: Tensor | None) -> Tensor:
        """(B, H, N, D) of what the projection made, (B, N, 3·H·D)."""
        if self.head_first:
            q, k, v = qkv.unflatten(2, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=3)  # each (B, H, N, D)
        else:
            q, k, v = split_heads(qkv, 3, self.num_heads)
        bias = shared if self.rel_pos is None else self.rel_pos.get_bias()
        return self.core(Heads(q, k, v, bias, self.scale, self.dropout_now()))

    def head_weights(self: Any) -> HeadWeights:
        if not self.head_first:
            return fused_head_weights(self.qkv, self.proj, self.num_heads)
        shape = self.num_heads, 3, self.dim_head
        q, k, v = rows(self.qkv, *shape).unbind(1)  # each (H, D, C)
        q_bias, k_bias, v_bias = fused_biases(self.qkv.bias, *shape, kind_axis=1)
        return HeadWeights(q, k, v, columns(self.proj, self.num_heads, self.dim_head), q_bias, k_bias, v_bias)

    def grid(self: Any) -> tuple[int, int] | None:
        return None if self.rel_pos is None else tuple(self.rel_pos.window_size)


class MaxViTSocket(_Projected, Socket, AttentionCl):
    """MaxViT: windows and grids, channels last."""

    family = "maxvit"
    attends = "windows"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        out = self.attend(self.qkv(x).flatten(1, -2), shared_rel_pos)
        shape = x.shape[:-1] + (-1,)  # noqa: RUF005 (what is traced can be added, not unpacked)
        return self.proj_drop(self.proj(merge_heads(out).reshape(shape)))


class CoAtNetSocket(_Projected, Socket, Attention2d):
    """CoAtNet: over a whole feature map, channels first."""

    family = "coatnet"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        out = self.attend(self.qkv(x).flatten(2).mT, shared_rel_pos)
        out = merge_heads(out).mT.reshape(x.shape[0], -1, x.shape[2], x.shape[3])
        return self.proj_drop(self.proj(out))
