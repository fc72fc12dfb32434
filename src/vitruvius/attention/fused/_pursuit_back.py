# mypy: ignore-errors
"""Triton kernels of principal attention pursuit, backward: a launch an iteration, after K' and the clipping have
been replayed from the saved L.

Letters as in `_pursuit.py`. From the gradients of K' (by attention's backward pass) and of w, in each iteration:
    g_c = g_K' + g_w;   g_z = g_c where nothing was clipped;   g_tau += ± g_c where it was;   g_k += g_z;
    g_L = (2 − s) g_K' − 2 g_z + g_w;   g_w ← g_z + (s − 1) g_K'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._pursuit import clip, refine
from vitruvius.attention.fused._tiles import load_rows, store_rows
from vitruvius.attention.fused._tiles_back import attend_back


@triton.jit
def rehearse(
    rows, iterations, keys, key_stride, lows, step_stride, cleans, sides, next_step, tau,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """K' of some rows in every iteration, and where keys were clipped; steps lie `next_step` entries apart."""
    key = load_rows(keys, rows, key_stride, N, D, W, False).to(tl.float32)
    z = key
    clean = clip(key, tau, CLIP)
    mixed = clean
    for step in range(iterations):
        store_rows(cleans + step * next_step, rows, D, clean, N, D, W)
        if CLIP:
            side = (z >= tau).to(tl.int8) - (z <= -tau).to(tl.int8)
            store_rows(sides + step * next_step, rows, D, side, N, D, W)
        number = tl.where(step < iterations - 1, N, 0)
        low = load_some(lows + step * tl.cast(step_stride, tl.int64), rows, number, H * D, D, W).to(tl.float32)
        z, clean, mixed = refine(key, mixed, low, tau, SIGN, CLIP)


@triton.jit
def prepare(
    step, last, rows, grad, out, lows, step_stride, grads, deltas,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """What the backward pass through iteration `step` reads: g_L, and its product with L."""
    if step == last:
        low = load_rows(out, rows, H * D, N, D, W, False)
    else:
        low = load_rows(lows + step * tl.cast(step_stride, tl.int64), rows, H * D, N, D, W, False)
    grad = grad.to(grads.dtype.element_ty)
    store_rows(grads, rows, D, grad, N, D, W)
    tl.store(deltas + rows, tl.sum(grad.to(tl.float32) * low.to(tl.float32), 1), mask=rows < N)


@triton.jit
def retreat(
    step, last, rows, grad_query, grad_key, grad_value, out, lows, step_stride, scale,
    sides, next_grads, next_deltas, grad_q, grad_k, grad_v, sum_w,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr,
    SELF: tl.constexpr,
):  # fmt: skip
    """After attention's backward pass: gradients of q, k, v, w gather in memory. Returns the pull on tau."""
    later = tl.where(step < last, N, 0)  # nothing has been gathered before the last iteration
    store_rows(grad_v, rows, H * D, grad_value, N, D, W)
    if not SELF:
        store_rows(grad_q, rows, H * D, load_some(grad_q, rows, later, H * D, D, W) + scale * grad_query, N, D, W)
    grad_key = grad_key * scale
    grad_mixed = load_some(sum_w, rows, later, D, D, W)
    grad_z = grad_key + grad_mixed
    pull = 0.0
    if CLIP:
        side = load_rows(sides, rows, D, N, D, W, False).to(tl.float32)
        pull = tl.sum(tl.sum(grad_z * side, 1), 0)
        grad_z = tl.where(side == 0, grad_z, 0.0)
    store_rows(grad_k, rows, H * D, load_some(grad_k, rows, later, H * D, D, W) + grad_z, N, D, W)
    if step > 0:
        store_rows(sum_w, rows, D, grad_z + (SIGN - 1) * grad_key, N, D, W)
        grad_low = (2 - SIGN) * grad_key - 2.0 * grad_z + grad_mixed
        prepare(step - 1, last, rows, grad_low, out, lows, step_stride, next_grads, next_deltas, N, D, W, H)
    return pull


@triton.jit
def load_some(base, rows, number, stride, D: tl.constexpr, W: tl.constexpr):
    """(rows, W) of which rows from `number` on are zero."""
    columns = tl.arange(0, W)
    inside = (rows < number)[:, None] & (columns < D)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def pull_of_mean(pull, tau, coefficient, N: tl.constexpr, D: tl.constexpr, INVERSE: tl.constexpr):
    """From the gradient of tau to that of |k|, entry by entry."""
    rate = -tau / coefficient * tau if INVERSE else coefficient
    return tl.where(pull == 0.0, 0.0, pull * rate / (N * D))


@triton.jit
def begin_back(
    k, out, low, taus, grad_out, cleans, grads, sides, deltas,
    k_b, k_h, k_n, o_b, o_h, o_n, step_stride, iterations,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    SIGN: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """What the backward pass reads, as far as it is known before; steps of cleans and sides lie step_stride apart."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    flat = b * (N * H * D) + h * D
    ours = tl.cast(head, tl.int64) * (N * D)
    tau = 0.0
    if CLIP:
        tau = tl.load(taus + head)
    grad = load_rows(grad_out + b * o_b + h * o_h, rows, o_n, N, D, W, False)
    last = iterations - 1
    prepare(last, last, rows, grad, out + flat, low + flat, step_stride, grads + ours, deltas + head * N, N, D, W, H)
    rehearse(
        rows, iterations, k + b * k_b + h * k_h, k_n, low + flat, step_stride, cleans + ours, sides + ours,
        tl.cast(step_stride, tl.int64), tau, N, D, W, H, SIGN, CLIP,
    )  # fmt: skip


@triton.jit
def iterate_back(
    q, v, bias, out, low, sums, pulls, clean, sides, grads, deltas, next_grads, next_deltas,
    grad_q, grad_k, grad_v, sum_w,
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
    grad_query, grad_key, grad_value = attend_back(
        nothing, nothing, load_some(grad_v + flat, rows, tl.where(step < last, N, 0), H * D, D, W), rows,
        q + b * q_b + h * q_h, q_n, clean + ours, D, v + b * v_b + h * v_h, v_n, grads + ours, D,
        sums + (step * count + head) * N, deltas + head * N, bias + b * bias_b + h * bias_h, bias_n,
        scale * 1.4426950408889634, N, D, W, KEYS, TAIL, BIAS, SELF, EXACT,
    )  # fmt: skip
    pull = retreat(
        step, last, rows, grad_query, grad_key, grad_value, out + flat, low + flat, step_stride, scale,
        sides + ours, next_grads + ours, next_deltas + head * N, grad_q + flat, grad_k + flat, grad_v + flat,
        sum_w + ours, N, D, W, H, SIGN, CLIP, SELF,
    )  # fmt: skip
    if CLIP:
        tl.store(pulls + (step * count + head) * tl.num_programs(0) + tl.program_id(0), pull)


@triton.jit
def finish_back(
    k, grad_k, taus, pulls, k_b, k_h, k_n, coefficient,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """What pulls on tau (pulls: one number per head), distributed over the keys, whose mean size tau is made of."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    share = pull_of_mean(tl.load(pulls + head), tl.load(taus + head), coefficient, N, D, INVERSE)
    if share != 0.0:
        ours = grad_k + b * (N * H * D) + h * D
        key = load_rows(k + b * k_b + h * k_h, rows, k_n, N, D, W, False).to(tl.float32)
        toward = (key > 0).to(tl.float32) - (key < 0).to(tl.float32)
        store_rows(ours, rows, H * D, load_some(ours, rows, N, H * D, D, W) + share * toward, N, D, W)
