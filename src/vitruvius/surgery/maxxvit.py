"""MaxViT and CoAtNet: timm.models.maxxvit.AttentionCl in windows and grids, Attention2d over feature maps.

B batch, H heads, N tokens, D head width, C model width.
"""

from __future__ import annotations

from typing import Any

from timm.models.maxxvit import Attention2d, AttentionCl
from torch import Tensor

from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, columns, fused_biases, fused_head_weights, merge_heads, rows, split_heads


class MaxViTSocket(Socket, AttentionCl):
    """MaxViT: windows and grids, channels last."""

    family = "maxvit"
    attends = "windows"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = _split(self, self.qkv(x).flatten(1, -2))  # each (B, H, N, D)
        out = self.core(Heads(q, k, v, _bias(self, shared_rel_pos), self.scale, self.dropout_now()))
        shape = x.shape[:-1] + (-1,)  # noqa: RUF005 (what is traced can be added, not unpacked)
        return self.proj_drop(self.proj(merge_heads(out).reshape(shape)))

    def head_weights(self: Any) -> HeadWeights:
        return _head_weights(self)

    def grid(self: Any) -> tuple[int, int] | None:
        return _window(self)


class CoAtNetSocket(Socket, Attention2d):
    """CoAtNet: over a whole feature map, channels first."""

    family = "coatnet"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = _split(self, self.qkv(x).flatten(2).mT)  # each (B, H, N, D)
        out = self.core(Heads(q, k, v, _bias(self, shared_rel_pos), self.scale, self.dropout_now()))
        out = merge_heads(out).mT.reshape(x.shape[0], -1, x.shape[2], x.shape[3])
        return self.proj_drop(self.proj(out))

    def head_weights(self: Any) -> HeadWeights:
        return _head_weights(self)

    def grid(self: Any) -> tuple[int, int] | None:
        return _window(self)


def _split(module: Any, qkv: Tensor) -> tuple[Tensor, ...]:
    """(B, N, 3·H·D) → q, k, v; heads or kinds first, as the model was built."""
    if module.head_first:
        return qkv.unflatten(2, (module.num_heads, -1)).transpose(1, 2).chunk(3, dim=3)
    return split_heads(qkv, 3, module.num_heads)


def _bias(module: Any, shared: Tensor | None) -> Tensor | None:
    return shared if module.rel_pos is None else module.rel_pos.get_bias()


def _window(module: Any) -> tuple[int, int] | None:
    if module.rel_pos is None:
        return None
    rows, columns = module.rel_pos.window_size
    return rows, columns


def _head_weights(module: Any) -> HeadWeights:
    if not module.head_first:
        return fused_head_weights(module.qkv, module.proj, module.num_heads)
    shape = module.num_heads, 3, module.dim_head
    q, k, v = rows(module.qkv, *shape).unbind(1)  # each (H, D, C)
    q_bias, k_bias, v_bias = fused_biases(module.qkv.bias, *shape, kind_axis=1)
    return HeadWeights(q, k, v, columns(module.proj, module.num_heads, module.dim_head), q_bias, k_bias, v_bias)
