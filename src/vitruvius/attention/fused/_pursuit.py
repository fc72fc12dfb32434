# mypy: ignore-errors
"""Triton kernels of principal attention pursuit, forward: one launch an iteration, and what it shares with whole heads.

With w = c + L of the step before (L the low-rank part, c the clipped keys), the pursuit of `attention/rpc.py` needs
one state besides L:      c = clip(k + w − 2L, tau);   K' = c + (2 − s) L + (s − 1) w;   w ← c + L,
so that K' of any iteration follows from k and the earlier L alone, entry by entry. s is the sign of the dual.
Memory of out and low: (B, N, H, D); N tokens, D width, W the power of two above D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._tiles import attend, load_rows, store_rows


@triton.jit
def clip(x, tau, CLIP: tl.constexpr):
    if CLIP:
        x = tl.minimum(tl.maximum(x, -tau), tau)
    return x


@triton.jit
def refine(key, mixed, low, tau, SIGN: tl.constexpr, CLIP: tl.constexpr):
    """(z before clipping, K', next w) from k, w and L."""
    z = key + mixed - 2.0 * low
    clipped = clip(z, tau, CLIP)
    return z, clipped + (2 - SIGN) * low + (SIGN - 1) * mixed, clipped + low


@triton.jit
def threshold(
    keys, key_stride, coefficient,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """tau = coefficient · mean|k|, or coefficient / mean|k|."""
    size = tl.zeros((ROWS, W), tl.float32)
    for start in range(0, N, ROWS):
        size += tl.abs(load_rows(keys, start + tl.arange(0, ROWS), key_stride, N, D, W, False).to(tl.float32))
    mean = tl.maximum(tl.sum(tl.sum(size, 1), 0) / (N * D), 1.0842021724855044e-19)
    return coefficient / mean if INVERSE else coefficient * mean


@triton.jit
def conclude(
    step, last, rows, low, lse, key, out, lows, step_stride, sums, target, squares, tau,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr,
    SQUARED: tl.constexpr,
):  # fmt: skip
    """Store L of some rows after attention, and their next K' in `target`; w is made again from the earlier L."""
    low = low.to(out.dtype.element_ty)
    tl.store(sums + rows, lse, mask=rows < N)
    if step == last:
        store_rows(out, rows, H * D, low, N, D, W)
    else:
        wide = tl.cast(step_stride, tl.int64)
        store_rows(lows + step * wide, rows, H * D, low, N, D, W)
        single = key.to(tl.float32)
        mixed = clip(single, tau, CLIP)
        for earlier in range(step):
            before = load_rows(lows + earlier * wide, rows, H * D, N, D, W, False).to(tl.float32)
            _, _, mixed = refine(single, mixed, before, tau, SIGN, CLIP)
        _, clean, _ = refine(single, mixed, low.to(tl.float32), tau, SIGN, CLIP)
        remember(target, squares, rows, clean, N, D, W, SQUARED)


@triton.jit
def remember(
    target, squares, rows, clean, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, SQUARED: tl.constexpr
):  # fmt: skip
    """Store some rows of K', and their squared lengths as rounding leaves them."""
    clean = clean.to(target.dtype.element_ty)
    store_rows(target, rows, D, clean, N, D, W)
    if SQUARED:
        single = clean.to(tl.float32)
        tl.store(squares + rows, tl.sum(single * single, 1), mask=rows < N)


@triton.jit
def begin(
    k, taus, clean, k_b, k_h, k_n, coefficient,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CLIP: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """tau and the first K' of one head, for heads too long for `pursue`."""
    head = tl.program_id(0)
    keys = k + tl.cast(head // H, tl.int64) * k_b + tl.cast(head % H, tl.int64) * k_h
    ours = tl.cast(head, tl.int64) * (N * D)
    tau = 0.0
    if CLIP:
        tau = threshold(keys, k_n, coefficient, N, D, W, ROWS, INVERSE)
        tl.store(taus + head, tau)
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        key = load_rows(keys, rows, k_n, N, D, W, False).to(tl.float32)
        store_rows(clean + ours, rows, D, clip(key, tau, CLIP), N, D, W)


@triton.jit
def iterate(
    q, k, v, bias, out, low, sums, taus, source, target,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, step_stride,
    count, step, last, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr,
    SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One iteration of some rows of one head, for heads too long for `pursue`."""
    head = tl.program_id(1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    flat = b * (N * H * D) + h * D
    ours = tl.cast(head, tl.int64) * (N * D)
    tau = 0.0
    if CLIP:
        tau = tl.load(taus + head)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if SELF:
        query = load_rows(source + ours, rows, D, N, D, W, False)
    else:
        query = load_rows(q + b * q_b + h * q_h, rows, q_n, N, D, W, False)
    key = load_rows(k + b * k_b + h * k_h, rows, k_n, N, D, W, False)
    result, lse = attend(
        query, rows, source + ours, D, v + b * v_b + h * v_h, v_n, bias + b * bias_b + h * bias_h, bias_n,
        scale * 1.4426950408889634, N, D, W, ROWS, KEYS, TAIL, BIAS, EXACT,
    )  # fmt: skip
    conclude(
        step, last, rows, result, lse, key, out + flat, low + flat, step_stride,
        sums + (step * count + head) * N, target + ours, sums, tau, N, D, W, H, SIGN, CLIP, False,
    )  # fmt: skip
