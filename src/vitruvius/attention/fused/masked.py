"""Attention under a fixed keep-mask on the GPU: work falls with what the mask removes; nothing of it is dense.

You et al. 2023, "ViTCoD", arXiv:2210.09573. The plain twin is `attention/mask.py` before `attention/softmax.py`.
Forward, Hopper GPUs have a kernel of their own for short heads; its lists follow the others in a pattern.
B batch, H heads, N queries, M keys, D width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius.attention.fused._launch import in_eager_mode, like_rows, multiprocessors
from vitruvius.attention.fused._pattern import make_lists
from vitruvius.attention.fused._switch import rows_together
from vitruvius.attention.fused.hopper._dispatch import given_up, on_hopper
from vitruvius.attention.fused.hopper._mask_plan import SIZES, Plan, make_plan
from vitruvius.heads import Heads

SHORT = 512  # tokens
LISTS = 12  # of a pattern without a plan for Hopper GPUs
WIDTH, FARTHEST = 64, 2**22  # of heads the Hopper kernel takes: their width, entries from row to row
TOGETHER, APART = 3, 4500  # programs of a multiprocessor at once, by their registers; cycles between their beginnings


class Tile(NamedTuple):
    """Rows and columns of a tile (a row's bits of a block are one word), warps and stages of its program."""

    rows: int
    keys: int
    warps: int
    stages: int


FORWARD, FORWARD_LONG = Tile(64, 32, 4, 2), Tile(64, 32, 4, 3)
BACKWARD, BACKWARD_LONG = Tile(64, 32, 4, 1), Tile(64, 32, 4, 3)


def make_pattern(keep: Tensor) -> list[Tensor]:
    """A bool mask (H, N, M), True = kept, as the kernels read it: for the way there, for q's and for k's gradient.

    Then, for sizes that the Hopper kernel takes, what it reads.

    `keep` is that mask; every query keeps at least one key.
    """
    there, back = _tiles(keep.shape[1], keep.shape[2])
    lists = [make_lists(mask, rows=tile.rows, keys=tile.keys) for mask, tile in
             ((keep, there), (keep, back), (keep.mT, back))]  # fmt: skip
    plan = make_plan(keep) if keep.shape[1] in SIZES and keep.shape[2] in SIZES else ()
    return [*(tensor for four in lists for tensor in four), *plan]


def attend_kept(heads: Heads, pattern: list[Tensor]) -> Tensor:
    """softmax(q kᵀ · scale) v over the kept keys, (B, H, N, D). Heads with a bias or dropout are not for this.

    `heads` are on a GPU; `pattern` is what `make_pattern` made of the mask.
    """
    q, k, v = (rows_together(x) for x in heads[:3])
    call = torch.ops.vitruvius.masked if torch.compiler.is_compiling() else _eager
    out: Tensor = call(q, k, v, pattern, heads.scale)[0]
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """(out, log-sums)."""
    from vitruvius.attention.fused import _sparse as kernels

    out, sums = _room(q, k, v, pattern, scale)
    if _hopper_takes(q, k, v, pattern):
        try:
            _look_on_hopper(q, k, v, out, sums, pattern, scale)
            return out, sums
        except Exception as error:
            given_up(error)
    tile, _ = _tiles(q.shape[2], k.shape[2])
    tiles = pattern[0].shape[1] // tile.rows
    kernels.look[_grid(q, k, tiles)](
        q, k, v, out, sums, *pattern[:4], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tiles, scale,
        **_settings(q, k, tile),
    )  # fmt: skip
    return out, sums


def _hopper_takes(q: Tensor, k: Tensor, v: Tensor, pattern: list[Tensor]) -> bool:
    near = all(x.stride(2) <= FARTHEST for x in (q, k, v))
    return len(pattern) > LISTS and q.shape[3] == WIDTH and near and on_hopper(q, k, v)


def _look_on_hopper(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pattern: list[Tensor], scale: float
) -> None:
    from vitruvius.attention.fused.hopper import _mask as kernels

    B, H, N, D = q.shape
    plan = Plan(*pattern[LISTS:])
    kernels.look[(B * H,)](
        q, k, v, out, sums, *plan, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale, APART,
        multiprocessors(q.device), N=N, W=D, H=H, TILES=plan.windows.shape[1], PLACES=plan.columns.shape[1],
        WINDOWS=plan.words.shape[2], PROGRAMS=TOGETHER, num_warps=4, maxnreg=168, enable_fp_fusion=True,
    )  # fmt: skip


def _room(q: Tensor, k: Tensor, v: Tensor, pattern: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    return like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pattern: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from vitruvius.attention.fused import _sparse as kernels

    grad_out = rows_together(grad_out)
    found = _room_back(grad_out, q, k, v, out, sums, pattern, scale)
    _, tile = _tiles(q.shape[2], k.shape[2])
    tiles, back_tiles = pattern[4].shape[1] // tile.rows, pattern[8].shape[1] // tile.rows
    kernels.look_back[_grid(q, k, tiles + back_tiles)](
        q, k, v, out, sums, grad_out, *found, *pattern[4:LISTS], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *grad_out.stride()[:3], tiles, back_tiles, scale, **_settings(q, k, tile),
    )  # fmt: skip
    return found


def _room_back(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pattern: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return like_rows(q), like_rows(k), like_rows(k)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, pattern, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *pattern)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd_backward(
    ctx: Any, grad_out: Tensor | None, *_: Any, call: Callable[..., Any] = _backward
) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 5
    tensors = ctx.saved_tensors
    return (*call(grad_out, *tensors[:5], list(tensors[5:]), ctx.scale), None, None)


def _backward_of_operator(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    *grad_qkv, _, _ = _autograd_backward(ctx, *grads, call=_masked_back)
    return (*grad_qkv, [None] * (len(ctx.saved_tensors) - 5), None)  # an operator wants one for each of a list


def _grid(q: Tensor, k: Tensor, tiles: int) -> tuple[int, int]:
    heads = q.shape[0] * q.shape[1]
    return (heads, tiles) if _long(q.shape[2], k.shape[2]) else (tiles, heads)


def _long(num_queries: int, num_keys: int) -> bool:
    return max(num_queries, num_keys) > SHORT


def _tiles(num_queries: int, num_keys: int) -> tuple[Tile, Tile]:
    """The tiles there and back."""
    return (FORWARD_LONG, BACKWARD_LONG) if _long(num_queries, num_keys) else (FORWARD, BACKWARD)


def _settings(q: Tensor, k: Tensor, tile: Tile) -> dict[str, Any]:
    """What is fixed when a kernel is compiled."""
    _, H, N, D = q.shape
    return {
        "N": N, "M": k.shape[2], "D": D, "W": 1 << (D - 1).bit_length(), "H": H, "ROWS": tile.rows,
        "KEYS": tile.keys, "LONG": _long(N, k.shape[2]), "EXACT": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps, "num_stages": tile.stages if q.dtype.itemsize == 2 else 1,
    }  # fmt: skip


_eager = in_eager_mode(_forward, _setup_context, _autograd_backward)
_masked = torch.library.custom_op("vitruvius::masked", _forward, mutates_args=())
_masked_back = torch.library.custom_op("vitruvius::masked_back", _backward, mutates_args=())
_masked.register_fake(_room)
_masked_back.register_fake(_room_back)
_masked.register_autograd(_backward_of_operator, setup_context=_setup_context)
