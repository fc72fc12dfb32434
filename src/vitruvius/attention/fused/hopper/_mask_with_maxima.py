# mypy: ignore-errors
"""Gluon kernel of attention under a fixed pattern: a head whose scores are beyond the range of exp2, with maxima.

It follows `_mask.py`, whose keys and values are still on the chip, and overwrites what that has stored.
N queries, W width, TILES and PLACES as in the lists of `_mask_plan.py`, WINDOWS of a tile at most
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from vitruvius.attention.fused.hopper._blocks import barrier, mma_layout, window
from vitruvius.attention.fused.hopper._mask_tiles import ask, finish, kept, marks, score


@gluon.jit
def attend_with_maxima(
    zero, q, out, sums, rows, windows, words, dense, keys, values, q_n, stretch,
    W: gl.constexpr, H: gl.constexpr, TILES: gl.constexpr, PLACES: gl.constexpr, WINDOWS: gl.constexpr,
):  # fmt: skip
    """A head whose scores are too large, or all too small, for exp2 as they are: in no hurry."""
    here = gl.arange(0, 64, gl.SliceLayout(1, mma_layout(W, 4)))
    q += zero
    rows += zero
    barrier()  # other threads may have stored a row than will do so now
    for t in range(TILES + 1):
        row = gl.load(rows + t * 64 + gl.where(t < TILES, here, here & 7))
        where = gl.load(windows + zero + gl.minimum(t, TILES - 1))
        if t == TILES:
            where = zero.to(gl.int64) + all_windows(PLACES)
        query = ask(q, row, q_n, W)
        acc, top, total = look_carefully(
            query, keys, values, words + zero + t * (WINDOWS * 64), dense, t == TILES, where, stretch, W
        )  # fmt: skip
        finish(acc, top, total, row, out, sums, H * W, W)


@gluon.jit
def look_carefully(query, keys, values, words, dense, all_dense, windows, stretch, W: gl.constexpr):
    """(acc, greatest scores, sums) of 64 rows; all_dense: of the eight dense rows, eight times."""
    mma: gl.constexpr = mma_layout(W, 4)
    slim: gl.constexpr = gl.SliceLayout(1, mma_layout(32, 4))
    acc = gl.zeros([64, W], gl.float32, mma)
    top = gl.full([64], -1e30, gl.float32, slim)
    total = gl.zeros([64], gl.float32, slim)
    count = (windows & 15).to(gl.int32)
    for i in range(count):
        start = ((windows >> (5 * i + 4)) & 31).to(gl.int32)
        raw = warpgroup_mma_wait(0, deps=(score(query, keys, start, W),))
        keep = kept_of_dense(dense + 32 * i) if all_dense else kept(marks(words + 64 * i))
        scores = gl.where(keep, raw * stretch, -float("inf"))
        peak = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - peak[:, None])
        fade = gl.exp2(top - peak)
        total = total * fade + gl.sum(weights, 1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, mma))[:, None]
        top = peak
        left = gl.convert_layout(weights.to(values.dtype), gl.DotOperandLayout(0, mma, 2))
        acc = warpgroup_mma(left, window(values, start, W), acc)
    return acc, gl.convert_layout(top, gl.SliceLayout(1, mma)), gl.convert_layout(total, gl.SliceLayout(1, mma))


@gluon.constexpr_function
def all_windows(places):
    """Eight windows, as the lists write them: of the first 128 places, then of the last 128."""
    starts = [(place if place < 128 else places - 256 + place) // 8 for place in range(0, 256, 32)]
    return sum(start << (4 + 5 * i) for i, start in enumerate(starts)) | 8


@gluon.jit
def kept_of_dense(dense):
    """(64, 32) bools of eight rows, eight times, from a word for each of 32 places."""
    layout: gl.constexpr = mma_layout(32, 4)
    word = gl.load(dense + gl.arange(0, 32, gl.SliceLayout(0, layout)))
    return ((word[None, :] >> (gl.arange(0, 64, gl.SliceLayout(1, layout)) & 7)[:, None]) & 1) != 0
