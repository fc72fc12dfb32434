# mypy: ignore-errors
"""Triton kernel of principal attention pursuit, forward, for heads that fit on the chip: all iterations in one program.

Letters as in `_pursuit.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._chunks import attend_anchored, attend_chunks, load_chunks
from vitruvius.attention.fused._pursuit import clip, conclude, remember, threshold
from vitruvius.attention.fused._tiles import load_rows


@triton.jit
def anchors(squares, rows, longest, scale, N: tl.constexpr):
    """Each row's score with itself, or more where another score could be 2¹⁰⁰ times it."""
    square = tl.load(squares + rows, mask=rows < N, other=0.0)
    return tl.maximum(scale * square, scale * longest * tl.sqrt(square) - 100.0)


@triton.jit
def pursue(
    q, k, v, bias, out, low, sums, taus, scratch, lengths, flags,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, step_stride,
    count, iterations, coefficient, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, REST: tl.constexpr,
    KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr, EVERY: tl.constexpr, SIGN: tl.constexpr,
    CLIP: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
    ANCHORED: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """All iterations of all heads (SOME: those with an odd flag); a program has scratch for K' of the head it works on.

    REST, unless 0: the rows of a smaller tile for what is left over after the full ones.
    ANCHORED, for keys that ask: row i has no score greater than ‖K'_i‖ max ‖K'‖, and that with itself is ‖K'_i‖², so
    that weights relative to `anchors` neither overflow nor vanish, unless a key is very long: then the head is flagged.
    """
    slot = tl.program_id(0)
    for head in range(slot, count, tl.num_programs(0)):
        wanted = 1
        if SOME:
            wanted = tl.load(flags + head) & 1
        if wanted != 0:
            longest = pursue_head(
                head, q, k, v, bias, out, low, sums, taus, scratch + slot * (N * D), lengths + slot * N,
                q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, step_stride, count, iterations,
                coefficient, scale, N, D, W, H, ROWS, REST, KEYS, CHUNKS, TAIL, EVERY, SIGN, CLIP, INVERSE, BIAS, SELF,
                EXACT, ANCHORED,
            )  # fmt: skip
            if ANCHORED:
                tl.store(flags + head, (scale * 1.4426950408889634 * longest * longest > 800.0).to(tl.int32))


@triton.jit
def pursue_head(
    head, q, k, v, bias, out, low, sums, taus, ours, squares,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_n, step_stride,
    count, iterations, coefficient, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, REST: tl.constexpr,
    KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr, EVERY: tl.constexpr, SIGN: tl.constexpr,
    CLIP: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
    ANCHORED: tl.constexpr,
):  # fmt: skip
    """All iterations of one head. Returns the length of its longest K' (ANCHORED only)."""
    stretch = scale * 1.4426950408889634
    everyone = tl.arange(0, EVERY)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    keys = k + b * k_b + h * k_h
    flat = b * (N * H * D) + h * D
    tau = 0.0
    if CLIP:
        tau = threshold(keys, k_n, coefficient, N, D, W, ROWS, INVERSE)
        tl.store(taus + head, tau)
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        clean = clip(load_rows(keys, rows, k_n, N, D, W, False).to(tl.float32), tau, CLIP)
        remember(ours, squares, rows, clean, N, D, W, ANCHORED)
    tl.debug_barrier()
    values = load_chunks(v + b * v_b + h * v_h, v_n, N, D, W, KEYS, CHUNKS, TAIL)
    longest_ever = 0.0
    for step in range(iterations):
        cleans = load_chunks(ours, D, N, D, W, KEYS, CHUNKS, TAIL)
        longest = 0.0
        if ANCHORED:
            longest = tl.sqrt(tl.max(tl.load(squares + everyone, mask=everyone < N, other=0.0), 0))
            longest_ever = tl.maximum(longest_ever, longest)
        tl.debug_barrier()  # all of K' is on the chip: rows may now be replaced in memory
        for start in range(0, N - N % ROWS if REST else N, ROWS):
            pursue_rows(
                start + tl.arange(0, ROWS), step, iterations - 1, cleans, values, longest, tau,
                q + b * q_b + h * q_h, q_n, keys, k_n, bias + b * bias_b + h * bias_h, bias_n, stretch,
                out + flat, low + flat, step_stride, sums + (step * count + head) * N, ours, squares,
                N, D, W, H, KEYS, CHUNKS, TAIL, SIGN, CLIP, BIAS, SELF, EXACT, ANCHORED,
            )  # fmt: skip
        if REST:
            pursue_rows(
                N - N % ROWS + tl.arange(0, REST), step, iterations - 1, cleans, values, longest, tau,
                q + b * q_b + h * q_h, q_n, keys, k_n, bias + b * bias_b + h * bias_h, bias_n, stretch,
                out + flat, low + flat, step_stride, sums + (step * count + head) * N, ours, squares,
                N, D, W, H, KEYS, CHUNKS, TAIL, SIGN, CLIP, BIAS, SELF, EXACT, ANCHORED,
            )  # fmt: skip
        tl.debug_barrier()
    return longest_ever


@triton.jit
def pursue_rows(
    rows, step, last, cleans, values, longest, tau, q, q_n, keys, k_n, bias, bias_n, stretch,
    out, low, step_stride, sums, ours, squares,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr,
    TAIL: tl.constexpr, SIGN: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr,
    EXACT: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """One iteration of some rows of a head, whose K' and values are on the chip."""
    query = load_rows(ours, rows, D, N, D, W, False) if SELF else load_rows(q, rows, q_n, N, D, W, False)
    key = load_rows(keys, rows, k_n, N, D, W, False)
    if ANCHORED:
        anchor = anchors(squares, rows, longest, stretch, N)
        result, lse = attend_anchored(query, cleans, values, anchor, stretch, N, KEYS, CHUNKS, TAIL, EXACT)
    else:
        result, lse = attend_chunks(
            query, rows, cleans, values, bias, bias_n, stretch, N, KEYS, CHUNKS, TAIL, BIAS, EXACT
        )  # fmt: skip
    tl.debug_barrier()  # every warp has read this tile's rows and anchors
    conclude(
        step, last, rows, result, lse, key, out, low, step_stride, sums, ours, squares, tau,
        N, D, W, H, SIGN, CLIP, ANCHORED,
    )  # fmt: skip
