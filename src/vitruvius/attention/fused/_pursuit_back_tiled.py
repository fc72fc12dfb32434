# mypy: ignore-errors
"""Triton kernels of principal attention pursuit, backward, for heads too long for one program: a launch an iteration.

Letters as in `_pursuit_back.py`; scratch is as large as the tensors, and a program works on some rows of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._pursuit_back import finish, load_some, prepare, pull_of_mean, rehearse, retreat
from vitruvius.attention.fused._tiles import load_rows
from vitruvius.attention.fused._tiles_back import attend_back


@triton.jit
def begin_back(
    k, out, low, taus, slope_out, cleans, slopes, sides, deltas,
    k_b, k_h, k_n, o_b, o_h, o_n, step_stride, iterations,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    SIGN: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """What the way back reads, as far as it is known before; the steps of cleans and sides lie step_stride apart."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    flat = b * (N * H * D) + h * D
    ours = tl.cast(head, tl.int64) * (N * D)
    tau = 0.0
    if CLIP:
        tau = tl.load(taus + head)
    slope = load_rows(slope_out + b * o_b + h * o_h, rows, o_n, N, D, W, False)
    last = iterations - 1
    prepare(last, last, rows, slope, out + flat, low + flat, step_stride, slopes + ours, deltas + head * N, N, D, W, H)
    rehearse(
        rows, iterations, k + b * k_b + h * k_h, k_n, low + flat, step_stride, cleans + ours, sides + ours,
        tl.cast(step_stride, tl.int64), tau, N, D, W, H, SIGN, CLIP,
    )  # fmt: skip


@triton.jit
def iterate_back(
    q, v, bias, out, low, sums, pulls, clean, sides, slopes, deltas, next_slopes, next_deltas,
    sum_k, sum_w, sum_v, sum_q,
    q_b, q_h, q_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, step_stride, count, step, last, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One iteration back of some rows."""
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    flat = b * (N * H * D) + h * D
    ours = tl.cast(head, tl.int64) * (N * D)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    nothing = tl.zeros((ROWS, W), tl.float32)
    slope_query, slope_key, slope_value = attend_back(
        nothing, nothing, load_some(sum_v + ours, rows, tl.where(step < last, N, 0), D, D, W), rows,
        q + b * q_b + h * q_h, q_n, clean + ours, D, v + b * v_b + h * v_h, v_n, slopes + ours, D,
        sums + (step * count + head) * N, deltas + head * N, bias + b * bias_b + h * bias_h, bias_n,
        scale * 1.4426950408889634, N, D, W, KEYS, TAIL, BIAS, SELF, EXACT,
    )  # fmt: skip
    pull = retreat(
        step, last, rows, slope_query, slope_key, slope_value, out + flat, low + flat, step_stride, scale,
        sides + ours, next_slopes + ours, next_deltas + head * N, sum_k + ours, sum_w + ours, sum_v + ours,
        sum_q + ours,
        N, D, W, H, SIGN, CLIP, SELF,
    )  # fmt: skip
    if CLIP:
        tl.store(pulls + (step * count + head) * tl.num_programs(0) + tl.program_id(0), pull)


@triton.jit
def finish_back(
    k, slope_q, slope_k, slope_v, sum_k, sum_v, sum_q, taus, pulls, k_b, k_h, k_n, coefficient,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CLIP: tl.constexpr,
    INVERSE: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """The gradients of some rows in their own type, with what pulls on tau shared out; pulls: one number a head."""
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    flat = b * (N * H * D) + h * D
    ours = tl.cast(head, tl.int64) * (N * D)
    share = 0.0
    if CLIP:
        share = pull_of_mean(tl.load(pulls + head), tl.load(taus + head), coefficient, N, D, INVERSE)
    finish(
        tl.program_id(0) * ROWS + tl.arange(0, ROWS), k + b * k_b + h * k_h, k_n,
        slope_q + flat, slope_k + flat, slope_v + flat, sum_k + ours, sum_v + ours, sum_q + ours, share,
        N, D, W, H, SELF,
    )  # fmt: skip
