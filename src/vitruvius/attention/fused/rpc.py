"""Robust principal components on the GPU: all iterations in one kernel, or one launch an iteration.

The plain twin is `attention/rpc.py`. Hopper GPUs have kernels of their own for heads of up to 256 tokens
(`hopper/`). Elsewhere, forward, a head of up to `WHOLE` tokens is one program's work; longer heads and the
backward pass take a launch an iteration. Only L and log-sums are saved.      B batch, H heads, N tokens, D width
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius.attention.fused import _launch as launch
from vitruvius.attention.fused._launch import Tiling, bias_of, in_eager_mode, like_rows, slots, strides
from vitruvius.attention.fused._switch import INTERPRETED, rows_together
from vitruvius.attention.fused.hopper import _calls as hopper
from vitruvius.attention.fused.hopper._dispatch import given_up, on_hopper
from vitruvius.heads import Heads

WHOLE = 272  # tokens
FORWARD = Tiling(rows=64, keys=64, warps=4, stages=1, programs=2)
TILED = Tiling(rows=64, keys=64, warps=4, stages=2, programs=1)
BACKWARD = Tiling(rows=64, keys=32, warps=4, stages=1, programs=1, registers=168)


def pursue(
    heads: Heads, *, iterations: int, coefficient: float, inverse: bool, asymmetric: bool = False, dual_sign: int = -1
) -> Tensor:
    """RPC's output, (B, H, N, D), clipping at tau = coefficient · mean|k| of each head, or coefficient / mean|k|.

    heads: on a GPU, without bias or dropout.
    iterations: of the pursuit, 1 or more.
    coefficient: the factor in tau.
    inverse: divide it by mean|k|, as the published code does, instead of multiplying.
    asymmetric: keep the queries; default: the cleaned keys ask.
    dual_sign: of Y / mu in the update of the keys: −1 as published, or +1.
    """
    q, k, v = (rows_together(x) for x in heads[:3])
    call = torch.ops.vitruvius.rpc if torch.compiler.is_compiling() else _eager
    query = q if asymmetric else None
    out: Tensor = call(query, k, v, heads.bias, iterations, coefficient, inverse, dual_sign, heads.scale)[0]
    return out


def _forward(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None, iterations: int, coefficient: float, inverse: bool,
    sign: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, L of the earlier iterations, log-sums, tau, flags of heads, for kernels only)."""
    from vitruvius.attention.fused import _pursuit as kernels

    out, low, sums, taus, flags = _room(q, k, v, bias, iterations, coefficient, inverse, sign, scale)
    run = _Run.of(q, k, v, bias, coefficient, sign, FORWARD if _fits(k, WHOLE) else TILED)
    B, H, N, D = k.shape
    low_or_out = low if iterations > 1 else out
    tensors = (run.q, k, v, run.bias, out, low_or_out, sums, taus)
    rule = (iterations, coefficient, inverse)
    done = False
    if hopper.takes(q, k, v, bias):
        try:
            hopper.pursue(k, v, out, low_or_out, sums, taus, flags, *rule, sign, scale)
            done = True
        except Exception as error:
            given_up(error)
    if _fits(k, WHOLE):
        _pursue_whole(run, k, v, out, low_or_out, sums, taus, flags, *rule, scale, only_flagged=done)
        return out, low, sums, taus, flags
    clean = k.new_empty(2, B, H, N, D)
    kernels.begin[(B * H,)](
        k, taus, clean, *k.stride()[:3], coefficient, INVERSE=inverse, num_warps=8,
        **run.only("N", "D", "W", "H", "CLIP"), ROWS=64,
    )  # fmt: skip
    for step in range(iterations):
        kernels.iterate[(run.blocks, B * H)](
            *tensors, clean[step % 2], clean[(step + 1) % 2], *run.strides, out.numel(), B * H, step, iterations - 1,
            scale, **run.settings,
        )  # fmt: skip
    return out, low, sums, taus, flags


def _pursue_whole(
    run: _Run, k: Tensor, v: Tensor, out: Tensor, low: Tensor, sums: Tensor, taus: Tensor, flags: Tensor,
    iterations: int, coefficient: float, inverse: bool, scale: float, *, only_flagged: bool,
) -> None:  # fmt: skip
    """A head in one program; first without looking for greatest scores, then with, for heads that need it."""
    from vitruvius.attention.fused._pursuit_whole import pursue

    B, H, N, D = k.shape
    grid = min(B * H, slots(k, FORWARD.programs))
    scratch = (k.new_empty(grid, N, D), sums.new_empty(grid, N))
    anchored = run.settings["SELF"] and not run.settings["BIAS"] and k.dtype != torch.float16  # 2¹⁰⁰ is too much for it
    for first in (True, False) if anchored and not only_flagged else (False,):
        pursue[(grid,)](
            run.q, k, v, run.bias, out, low, sums, taus, *scratch, flags, *run.strides, out.numel(), B * H, iterations,
            coefficient, scale, INVERSE=inverse, **run.settings, REST=rows_over(N, run.settings["ROWS"]),
            CHUNKS=N // run.settings["KEYS"], EVERY=launch.power_of_two(N), ANCHORED=first, SOME=anchored and not first,
        )  # fmt: skip


def rows_over(N: int, rows: int) -> int:
    """Rows of a smaller tile beside one full tile, as 64 patches and a class token leave; beside several it costs.

    `N` is the number of tokens, `rows` of a full tile.
    """
    return max(16, launch.power_of_two(N - rows)) % rows if rows < N < 2 * rows else 0


def _room(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None, iterations: int, coefficient: float, inverse: bool,
    sign: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, N, D = k.shape
    low = k.new_empty(iterations - 1, B, N, H, D)
    sums = k.new_empty(iterations, B, H, N, dtype=torch.float32)
    taus, flags = sums.new_empty(B, H), sums.new_empty(B, H, dtype=torch.int32)
    return like_rows(k), low, sums, taus, flags


def _backward(
    grad_out: Tensor, q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, low: Tensor,
    sums: Tensor, taus: Tensor, flags: Tensor, iterations: int, coefficient: float, inverse: bool, sign: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q (empty without q), k and v."""
    from vitruvius.attention.fused import _pursuit_back as kernels

    B, H, N, D = k.shape
    grad_out = rows_together(grad_out)
    found = _room_back(
        grad_out, q, k, v, bias, out, low, sums, taus, flags, iterations, coefficient, inverse, sign, scale
    )
    if hopper.takes(q, k, v, bias) and on_hopper(grad_out):
        try:
            hopper.pursue_back(
                grad_out, k, v, out, low if iterations > 1 else out, sums, taus, flags, *found[1:], iterations,
                coefficient, inverse, sign, scale,
            )  # fmt: skip
            return found
        except Exception as error:
            given_up(error)
    run = _Run.of(q, k, v, bias, coefficient, sign, BACKWARD)
    grid, last = (run.blocks, B * H), iterations - 1
    clean, side = k.new_empty(iterations, B, H, N, D), k.new_empty(iterations, B, H, N, D, dtype=torch.int8)
    grads, deltas, sum_w = k.new_empty(2, B, H, N, D), sums.new_empty(2, B, H, N), torch.empty_like(clean[0])
    pulls = sums.new_empty(iterations, B * H, run.blocks)
    low = low if iterations > 1 else out
    plain = run.only("N", "D", "W", "H", "ROWS")
    kernels.begin_back[grid](
        k, out, low, taus, grad_out, clean, grads[last % 2], side, deltas[last % 2], *k.stride()[:3],
        *grad_out.stride()[:3], out.numel(), iterations, **run.only("SIGN", "CLIP"), **plain,
    )  # fmt: skip
    for step in reversed(range(iterations)):
        now, then = step % 2, (step + 1) % 2
        kernels.iterate_back[grid](
            run.q, v, run.bias, out, low, sums, pulls, clean[step], side[step], grads[now], deltas[now],
            grads[then], deltas[then], *found, sum_w,
            *run.strides[:3], *run.strides[6:], out.numel(), B * H, step, last, scale, **run.settings,
        )  # fmt: skip
    if run.settings["CLIP"]:
        kernels.finish_back[grid](
            k, found[1], taus, pulls.sum((0, 2)), *k.stride()[:3], coefficient, INVERSE=inverse, **plain
        )  # fmt: skip
    return found


def _room_back(
    grad_out: Tensor, q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, low: Tensor,
    sums: Tensor, taus: Tensor, flags: Tensor, iterations: int, coefficient: float, inverse: bool, sign: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return k.new_empty(0) if q is None else like_rows(k), like_rows(k), like_rows(k)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, bias, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd_backward(
    ctx: Any, grad_out: Tensor | None, *_: Tensor | None, call: Callable[..., Any] = _backward
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 9
    q, *rest = ctx.saved_tensors
    grad_q, grad_k, grad_v = call(grad_out, q, *rest, *ctx.settings)
    return (None if q is None else grad_q, grad_k, grad_v, None, None, None, None, None, None)


_eager = in_eager_mode(_forward, _setup_context, _autograd_backward)
_rpc = torch.library.custom_op("vitruvius::rpc", _forward, mutates_args=())
_rpc_back = torch.library.custom_op("vitruvius::rpc_back", _backward, mutates_args=())
_rpc.register_fake(_room)
_rpc_back.register_fake(_room_back)
_rpc.register_autograd(functools.partial(_autograd_backward, call=_rpc_back), setup_context=_setup_context)


def _fits(k: Tensor, limit: int) -> bool:
    """Whether one program can hold a head on the chip: half precision, and wider heads count for more."""
    return k.shape[2] <= (limit if k.shape[3] <= 64 else limit // 2) and (k.dtype.itemsize == 2 or INTERPRETED)


class _Run(NamedTuple):
    """What every launch is given."""

    q: Tensor
    bias: Tensor
    strides: tuple[int, ...]
    blocks: int
    settings: dict[str, Any]

    @classmethod
    def of(
        cls, q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None, coefficient: float, sign: int, tiles: Tiling
    ) -> _Run:  # fmt: skip
        spread = bias_of(bias, k)
        query = k if q is None else q
        settings = launch.tiling(k, tiles) | {
            "SIGN": sign, "CLIP": not math.isinf(coefficient), "BIAS": bias is not None, "SELF": q is None,
        }  # fmt: skip
        blocks = -(-k.shape[2] // settings["ROWS"])
        return cls(query, spread, strides(query, k, v, spread), blocks, settings)

    def only(self, *names: str) -> dict[str, Any]:
        return {name: self.settings[name] for name in names}
