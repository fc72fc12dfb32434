# mypy: ignore-errors
"""Gluon kernel of attention under a fixed pattern, forward, for Hopper GPUs: a head at a time, its keys on the chip.

Tiles of 64 rows read windows of 32 keys, by the lists of `_mask_plan.py`. The densest rows come first
(`_mask_dense.py`): they need no tile, so their scores are found while the values are on their way.
First no greatest scores are sought: few heads need them, as bfloat16 has the range of float32. A head whose sums leave
that range is done again, with maxima (`_mask_with_maxima.py`).
N queries, W width, TILES and PLACES as in the lists, WINDOWS of a tile at most, PROGRAMS of a multiprocessor at once
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from vitruvius.attention.fused.hopper._blocks import mma_layout, shared_layout, window
from vitruvius.attention.fused.hopper._mask_dense import finish_dense, weigh_dense
from vitruvius.attention.fused.hopper._mask_tiles import (
    arrived,
    ask,
    fetch,
    fetch_places,
    finish,
    first_window,
    kept,
    marks,
    numbers,
    places_of,
    score,
)
from vitruvius.attention.fused.hopper._mask_with_maxima import attend_with_maxima


@gluon.jit
def look(
    q, k, v, out, sums, rows, columns, windows, words, dense,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, scale, delay, processors,
    N: gl.constexpr, W: gl.constexpr, H: gl.constexpr, TILES: gl.constexpr, PLACES: gl.constexpr,
    WINDOWS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ · scale) v over the kept keys, for one head."""
    dtype: gl.constexpr = k.dtype.element_ty
    here = gl.arange(0, 64, gl.SliceLayout(1, mma_layout(W, 4)))
    program = gl.program_id(0)
    rows = start_apart(rows, program, delay, processors, PROGRAMS)
    b = (program // H).to(gl.int64)
    h = head_of(program, processors, H).to(gl.int64)
    stretch = scale * 1.4426950408889634
    keys = gl.allocate_shared_memory(dtype, [PLACES // 8, 8, W], shared_layout(W))
    values = gl.allocate_shared_memory(dtype, [PLACES // 8, 8, W], shared_layout(W))
    queries = gl.allocate_shared_memory(dtype, [8, W], shared_layout(W))
    weights = gl.allocate_shared_memory(dtype, [2, 8, 128], shared_layout(64))
    rows += h * (TILES * 64 + 8)
    columns += h * PLACES
    windows += h * TILES
    words += h * (TILES * WINDOWS * 64)
    dense += h * 256
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    out += b * (N * H * W) + h * W
    sums += (b * H + h) * N
    row = gl.load(rows + here)
    few = numbers(rows + TILES * 64, 8, W)
    first, second, third = places_of(columns, PLACES, W)
    word = marks(words)
    where = gl.load(windows)
    fetch(queries, q, few, q_n, W)
    fetch_places(keys, k, first, second, third, k_n, PLACES, W)
    async_copy.commit_group()
    query = ask(q, row, q_n, W)
    fetch_places(values, v, first, second, third, v_n, PLACES, W)
    async_copy.commit_group()
    few, share, also = weigh_dense(weights, keys, queries, dense, rows + TILES * 64, sums, stretch, PLACES, W)
    raw = score(query, keys, first_window(where), W)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    arrived(0)
    finish_dense(weights, values, few, share, out, H * W, PLACES, W)
    strange = gl.zeros([64], gl.int32, gl.SliceLayout(1, mma_layout(W, 4)))
    top = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma_layout(W, 4)))
    for t in gl.static_range(TILES):
        next_row, next_word, next_where, next_query = row, word, where, query
        if t + 1 < TILES:  # what the next tile needs is on its way
            next_row = gl.load(rows + (t + 1) * 64 + here)
            next_word = marks(words + (t + 1) * (WINDOWS * 64))
            next_where = gl.load(windows + (t + 1))
            next_query = ask(q, next_row, q_n, W)
        acc, total, raw = look_at_tile(
            raw, query, next_query, keys, values, words + t * (WINDOWS * 64), word, where, first_window(next_where),
            stretch, W,
        )  # fmt: skip
        strange = strange | finish(acc, top, total, row, out, sums, H * W, W)
        row, word, where, query = next_row, next_word, next_where, next_query
    again = gl.max(strange, 0) | also
    if again != 0:  # again >> 8 is a nought, but the compiler does not know: else it would keep much at hand
        attend_with_maxima(
            again >> 8, q, out, sums, rows, windows, words, dense, keys, values, q_n, stretch,
            W, H, TILES, PLACES, WINDOWS,
        )  # fmt: skip


@gluon.jit
def look_at_tile(
    raw, query, next_query, keys, values, words, word, windows, next_start, stretch, W: gl.constexpr
):  # fmt: skip
    """(acc, sums) of 64 rows whose first scores are here, and the first scores of the next tile.

    Scores of the next window, at the end of the next tile, are under way while weights meet the values of this one.
    """
    mma: gl.constexpr = mma_layout(W, 4)
    count = (windows & 15).to(gl.int32)
    windows = windows >> 4
    acc = gl.zeros([64, W], gl.float32, mma)
    parts = gl.zeros([64, 8], gl.float32, mma_layout(8, 4))
    for _ in range(count - 1):
        start = (windows & 31).to(gl.int32)
        windows = windows >> 5
        words += 64
        next_raw = score(query, keys, (windows & 31).to(gl.int32), W)
        next_word = marks(words)
        acc, parts = add_window(raw, word, acc, parts, values, start, stretch, W)
        acc, raw = warpgroup_mma_wait(0, deps=(acc, next_raw))
        word = next_word
    next_raw = score(next_query, keys, next_start, W)
    acc, parts = add_window(raw, word, acc, parts, values, (windows & 31).to(gl.int32), stretch, W)
    acc, raw = warpgroup_mma_wait(0, deps=(acc, next_raw))
    return acc, gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, mma)), raw


@gluon.jit
def add_window(raw, word, acc, parts, values, start, stretch, W: gl.constexpr):
    """(acc, under way; sums of what a thread has itself) with one more window."""
    weights = gl.where(kept(word), gl.exp2(raw * stretch), 0.0)
    parts += gl.convert_layout(gl.sum(weights.reshape(64, 4, 8), 1), mma_layout(8, 4))
    left = gl.convert_layout(weights.to(values.dtype), gl.DotOperandLayout(0, mma_layout(W, 4), 2))
    return warpgroup_mma(left, window(values, start, W), acc, is_async=True), parts


@gluon.jit
def head_of(program, processors, H: gl.constexpr):
    """The head of a program. Programs of one multiprocessor get different ones: some heads keep more than others."""
    return (program % H + program // H * H // processors) % H


@gluon.jit
def start_apart(rows, program, delay, processors, PROGRAMS: gl.constexpr):
    """The rows as they are, but `delay` cycles later with each further program of a multiprocessor.

    Programs that start together load together and then compute together, and half of the chip is idle either way.
    Started apart, one loads while another computes, and those that follow them stay apart. On an H200, with 4500
    cycles: 0.0326 → 0.0315 ms (256 images, 3 heads, 197 tokens).
    """
    place = program // processors
    if (place > 0) & (place < PROGRAMS):
        rows += wait(place * delay)
    return rows


@gluon.jit
def wait(cycles):
    """0, after this many clock cycles."""
    return gl.inline_asm_elementwise(
        """{ .reg .u64 end, now, length; .reg .pred early;
        mov.u64 end, %clock64; cvt.u64.u32 length, $1; add.u64 end, end, length;
        AGAIN: mov.u64 now, %clock64; setp.lt.u64 early, now, end; @early bra AGAIN;
        mov.u32 $0, 0; }""",
        "=r,r", [cycles], gl.int32, False, 1,
    )  # fmt: skip
