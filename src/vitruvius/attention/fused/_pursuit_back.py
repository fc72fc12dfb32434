# mypy: ignore-errors
"""Triton kernels of principal attention pursuit, backward: K' and the clipping are replayed from the saved L.

Letters as in `_pursuit.py`. From the gradients of K' (by the attention's way back) and of w, iteration by iteration:
    g_c = g_K' + g_w;   g_z = g_c where nothing was clipped;   g_tau += ± g_c where it was;   g_k += g_z;
    g_L = (2 − s) g_K' − 2 g_z + g_w;   g_w ← g_z + (s − 1) g_K'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._chunks import attend_back_chunks, load_chunks
from vitruvius.attention.fused._pursuit import clip, refine
from vitruvius.attention.fused._tiles import load_rows, store_rows


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
    step, last, rows, slope, out, lows, step_stride, slopes, deltas,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """What the way back through iteration `step` reads: g_L, and its product with L."""
    if step == last:
        low = load_rows(out, rows, H * D, N, D, W, False)
    else:
        low = load_rows(lows + step * tl.cast(step_stride, tl.int64), rows, H * D, N, D, W, False)
    slope = slope.to(slopes.dtype.element_ty)
    store_rows(slopes, rows, D, slope, N, D, W)
    tl.store(deltas + rows, tl.sum(slope.to(tl.float32) * low.to(tl.float32), 1), mask=rows < N)


@triton.jit
def retreat(
    step, last, rows, slope_query, slope_key, slope_value, out, lows, step_stride, scale,
    sides, next_slopes, next_deltas, sum_k, sum_w, sum_v, sum_q,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr,
    SELF: tl.constexpr,
):  # fmt: skip
    """After attention's way back: gradients of k, w, v, q gather in float32. Returns the pull on tau."""
    later = tl.where(step < last, N, 0)  # nothing has been gathered before the last iteration
    store_rows(sum_v, rows, D, slope_value, N, D, W)
    if not SELF:
        store_rows(sum_q, rows, D, load_some(sum_q, rows, later, D, D, W) + scale * slope_query, N, D, W)
    slope_key = slope_key * scale
    slope_mixed = load_some(sum_w, rows, later, D, D, W)
    slope_z = slope_key + slope_mixed
    pull = 0.0
    if CLIP:
        side = load_rows(sides, rows, D, N, D, W, False).to(tl.float32)
        pull = tl.sum(tl.sum(slope_z * side, 1), 0)
        slope_z = tl.where(side == 0, slope_z, 0.0)
    store_rows(sum_k, rows, D, load_some(sum_k, rows, later, D, D, W) + slope_z, N, D, W)
    if step > 0:
        store_rows(sum_w, rows, D, slope_z + (SIGN - 1) * slope_key, N, D, W)
        slope_low = (2 - SIGN) * slope_key - 2.0 * slope_z + slope_mixed
        prepare(step - 1, last, rows, slope_low, out, lows, step_stride, next_slopes, next_deltas, N, D, W, H)
    return pull


@triton.jit
def load_some(base, rows, number, stride, D: tl.constexpr, W: tl.constexpr):
    """(rows, W) of which rows from `number` on are zero."""
    columns = tl.arange(0, W)
    inside = (rows < number)[:, None] & (columns < D)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def finish(
    rows, keys, key_stride, slope_q, slope_k, slope_v, sum_k, sum_v, sum_q, pull,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """The gathered gradients in the type of their tensors; `pull` is the gradient of mean|k| over the N · D keys."""
    key = load_rows(keys, rows, key_stride, N, D, W, False).to(tl.float32)
    toward = (key > 0).to(tl.float32) - (key < 0).to(tl.float32)
    store_rows(slope_k, rows, H * D, load_some(sum_k, rows, N, D, D, W) + pull * toward, N, D, W)
    store_rows(slope_v, rows, H * D, load_some(sum_v, rows, N, D, D, W), N, D, W)
    if not SELF:
        store_rows(slope_q, rows, H * D, load_some(sum_q, rows, N, D, D, W), N, D, W)


@triton.jit
def pull_of_mean(pull, tau, coefficient, N: tl.constexpr, D: tl.constexpr, INVERSE: tl.constexpr):
    """From the gradient of tau to that of |k|, entry by entry."""
    rate = -tau / coefficient * tau if INVERSE else coefficient
    return tl.where(pull == 0.0, 0.0, pull * rate / (N * D))


@triton.jit
def pursue_back(
    q, k, v, bias, out, low, sums, taus, slope_out, slope_q, slope_k, slope_v, cleans, slopes, singles, sides, deltas,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, o_b, o_h, o_n, step_stride,
    count, iterations, coefficient, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNKS: tl.constexpr, TAIL: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr, INVERSE: tl.constexpr,
    BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """All iterations back for all heads; each program has scratch for one: K' and sides of every iteration, g_L and
    its product with L twice, and four sums."""
    slot = tl.program_id(0)
    SIZE: tl.constexpr = N * D
    clean = cleans + slot * (iterations * SIZE)
    slant = slopes + slot * (2 * SIZE)
    single = singles + slot * (4 * SIZE)
    side = sides + slot * (iterations * SIZE)
    delta = deltas + slot * (2 * N)
    last = iterations - 1
    for head in range(slot, count, tl.num_programs(0)):
        b = tl.cast(head // H, tl.int64)
        h = tl.cast(head % H, tl.int64)
        keys = k + b * k_b + h * k_h
        flat = b * (N * H * D) + h * D
        tau = 0.0
        if CLIP:
            tau = tl.load(taus + head)
        for start in range(0, N, ROWS):
            rows = start + tl.arange(0, ROWS)
            slope = load_rows(slope_out + b * o_b + h * o_h, rows, o_n, N, D, W, False)
            prepare(last, last, rows, slope, out + flat, low + flat, step_stride, slant, delta, N, D, W, H)
            rehearse(
                rows, iterations, keys, k_n, low + flat, step_stride, clean, side, SIZE, tau,
                N, D, W, H, SIGN, CLIP,
            )  # fmt: skip
        tl.debug_barrier()
        values = load_chunks(v + b * v_b + h * v_h, v_n, N, D, W, KEYS, CHUNKS, TAIL)
        pull = 0.0
        for done in range(iterations):
            now = done % 2
            then = 1 - now
            step = last - done
            kept = load_chunks(clean + step * SIZE, D, N, D, W, KEYS, CHUNKS, TAIL)
            slants = load_chunks(slant + now * SIZE, D, N, D, W, KEYS, CHUNKS, TAIL)
            queries = kept
            if not SELF:
                queries = load_chunks(q + b * q_b + h * q_h, q_n, N, D, W, KEYS, CHUNKS, TAIL)
            for start in range(0, N, ROWS):
                rows = start + tl.arange(0, ROWS)
                key = load_rows(clean + step * SIZE, rows, D, N, D, W, False)
                query = key
                if not SELF:
                    query = load_rows(q + b * q_b + h * q_h, rows, q_n, N, D, W, False)
                nothing = tl.zeros((ROWS, W), tl.float32)
                slope_query, slope_key, slope_value = attend_back_chunks(
                    nothing, nothing, load_some(single + 2 * SIZE, rows, tl.where(done > 0, N, 0), D, D, W),
                    query, key, load_rows(v + b * v_b + h * v_h, rows, v_n, N, D, W, False),
                    load_rows(slant + now * SIZE, rows, D, N, D, W, False), rows, queries, kept, values, slants,
                    sums + (step * count + head) * N, delta + now * N, bias + b * bias_b + h * bias_h, bias_n,
                    scale * 1.4426950408889634, N, KEYS, CHUNKS, TAIL, BIAS, SELF, EXACT,
                )  # fmt: skip
                pull += retreat(
                    step, last, rows, slope_query, slope_key, slope_value, out + flat, low + flat, step_stride,
                    scale, side + step * SIZE, slant + then * SIZE, delta + then * N,
                    single, single + SIZE, single + 2 * SIZE, single + 3 * SIZE,
                    N, D, W, H, SIGN, CLIP, SELF,
                )  # fmt: skip
            tl.debug_barrier()
        share = 0.0
        if CLIP:
            share = pull_of_mean(pull, tau, coefficient, N, D, INVERSE)
        for start in range(0, N, ROWS):
            finish(
                start + tl.arange(0, ROWS), keys, k_n, slope_q + flat, slope_k + flat, slope_v + flat,
                single, single + 2 * SIZE, single + 3 * SIZE, share, N, D, W, H, SELF,
            )  # fmt: skip
        tl.debug_barrier()
