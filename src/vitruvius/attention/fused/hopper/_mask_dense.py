# mypy: ignore-errors
"""Gluon kernel of attention under a fixed pattern: the eight densest rows of a head, computed the other way round.

Products have 64 rows: eight of them would leave most idle. So the keys are the rows and the eight queries the columns,
and so with the values. The places of a head (PLACES, more than 128) are its first 128 and its last 128; what both have
counts in the first. Weights need no values, so there are two steps. W width, 64
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from vitruvius.attention.fused.hopper._blocks import mma_layout, rows_at
from vitruvius.attention.fused.hopper._mask_tiles import arrived, out_of_range


@gluon.jit
def weigh_dense(
    weights, keys, queries, bits, rows, sums, stretch, PLACES: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Fill the weights (2, 8, 128) once keys and queries are there, while a group of copies is still on its way.

    Returns the rows, what to multiply them with in the end, and whether their sums left the range.
    """
    keep_first = kept_across(bits)
    keep_last = kept_across(bits + 128)
    row = gl.load(rows + gl.arange(0, 8, gl.SliceLayout(0, mma_layout(8, 4))))
    arrived(1)
    first = score_across(keys, 0, queries, W)
    last = score_across(keys, (PLACES - 128) // 8, queries, W)
    first, last = warpgroup_mma_wait(0, deps=(first, last))
    first = gl.where(keep_first, gl.exp2(first * stretch), 0.0)
    last = gl.where(keep_last, gl.exp2(last * stretch), 0.0)
    weights.index(0).store(first.to(keys.dtype).permute((1, 0)))
    weights.index(1).store(last.to(keys.dtype).permute((1, 0)))
    total = gl.sum(first + last, 0)
    gl.store(sums + row, gl.log2(total))
    return row, 1.0 / gl.maximum(total, 1e-30), gl.max(out_of_range(total), 0)


@gluon.jit
def finish_dense(weights, values, row, share, out, out_n, PLACES: gl.constexpr, W: gl.constexpr):
    """Store the rows, once the values are there and the weights are seen by all."""
    narrow: gl.constexpr = mma_layout(8, 4)
    first = rows_at(values, 0, 128, W).permute((1, 0))
    last = rows_at(values, (PLACES - 128) // 8, 128, W).permute((1, 0))
    acc = gl.zeros([W, 8], gl.float32, narrow)
    acc = warpgroup_mma(first, weights.index(0).permute((1, 0)), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(last, weights.index(1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    place = row[None, :] * out_n + gl.arange(0, W, gl.SliceLayout(1, narrow))[:, None]
    gl.store(out + place, (acc * share[None, :]).to(out.dtype.element_ty))


@gluon.jit
def score_across(keys, START: gl.constexpr, queries, W: gl.constexpr):
    """k qᵀ of 128 places and 8 queries, under way."""
    nothing = gl.zeros([128, 8], gl.float32, mma_layout(8, 4))
    half = rows_at(keys, START, 128, W)
    return warpgroup_mma(half, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def kept_across(bits):
    """(128, 8) bools from a word for each place."""
    narrow: gl.constexpr = mma_layout(8, 4)
    word = gl.load(bits + gl.arange(0, 128, gl.SliceLayout(1, narrow)))
    return ((word[:, None] >> gl.arange(0, 8, gl.SliceLayout(0, narrow))[None, :]) & 1) != 0
