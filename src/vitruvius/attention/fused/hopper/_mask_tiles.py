# mypy: ignore-errors
"""Gluon blocks of attention under a fixed pattern: rows that come and go by lists, and windows of 32 keys.

The lists are those of `_mask_plan.py`. A tile has 64 rows, W is 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from vitruvius.attention.fused.hopper._blocks import barrier, copy, mma_layout, rows_at, window


@gluon.constexpr_function
def line_layout(W):
    """Layout of (64, W) in which eight lanes (W = 64) write a whole line of memory, with the warps of a product."""
    lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, W])


@gluon.constexpr_function
def row_layout(W):
    """Layout in which rows are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])


@gluon.jit
def numbers(rows, ROWS: gl.constexpr, W: gl.constexpr):
    return gl.load(rows + gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(W))))


@gluon.jit
def fetch(target, source, which, stride, W: gl.constexpr):
    """Send for some rows."""
    copy(target, source + (which[:, None] * stride + gl.arange(0, W, gl.SliceLayout(0, row_layout(W)))[None, :]))


@gluon.constexpr_function
def second_part(places):
    """Places beyond the first 128 are filled in powers of two, of which this is the greatest."""
    return 1 << ((places - 128).bit_length() - 1)


@gluon.jit
def places_of(columns, PLACES: gl.constexpr, W: gl.constexpr):
    """The columns at all places, in three parts; the last stands for nothing where two are enough."""
    SECOND: gl.constexpr = second_part(PLACES)
    THIRD: gl.constexpr = PLACES - 128 - SECOND
    first = numbers(columns, 128, W)
    second = numbers(columns + 128, SECOND, W)
    third = numbers(columns + 128 + SECOND, THIRD, W) if THIRD > 0 else second
    return first, second, third


@gluon.jit
def fetch_places(target, source, first, second, third, stride, PLACES: gl.constexpr, W: gl.constexpr):
    """Send for the rows at all places."""
    SECOND: gl.constexpr = second_part(PLACES)
    THIRD: gl.constexpr = PLACES - 128 - SECOND
    fetch(rows_at(target, 0, 128, W), source, first, stride, W)
    fetch(rows_at(target, 16, SECOND, W), source, second, stride, W)
    if THIRD > 0:
        fetch(rows_at(target, 16 + SECOND // 8, THIRD, W), source, third, stride, W)


@gluon.jit
def arrived(GROUPS: gl.constexpr):
    """Wait until at most some groups of copies are on their way; products may read the others, and what was stored."""
    async_copy.wait_group(GROUPS)
    fence_async_shared()
    barrier()


@gluon.jit
def ask(q, rows, stride, W: gl.constexpr):
    """Queries of 64 rows, straight into registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout(32, 4), 2)
    which = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    return gl.load(q + which[:, None] * stride + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def first_window(windows):
    """Where the first window of a tile begins."""
    return ((windows >> 4) & 31).to(gl.int32)


@gluon.jit
def score(query, keys, start, W: gl.constexpr):
    """q kᵀ of a window, under way."""
    nothing = gl.zeros([64, 32], gl.float32, mma_layout(32, 4))
    return warpgroup_mma(query, window(keys, start, W).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def marks(words):
    """A word for each of 64 rows."""
    return gl.load(words + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(32, 4))))


@gluon.jit
def kept(word):
    """(64, 32) bools."""
    return ((word[:, None] >> gl.arange(0, 32, gl.SliceLayout(0, mma_layout(32, 4)))[None, :]) & 1) != 0


@gluon.jit
def out_of_range(total):
    """Where sums of weights relative to nothing are too large or too small to be trusted."""
    return (total > 1e18).to(gl.int32) | (total < 1e-18).to(gl.int32)


@gluon.jit
def finish(acc, top, total, rows, out, sums, out_n, W: gl.constexpr):
    """Store 64 rows, whole lines at a time; returns whether their sums left the range."""
    lines: gl.constexpr = line_layout(W)
    gl.store(sums + rows, top + gl.log2(total))
    result = (acc * (1.0 / gl.maximum(total, 1e-30))[:, None]).to(out.dtype.element_ty)
    which = gl.convert_layout(rows, gl.SliceLayout(1, lines))
    place = which[:, None] * out_n + gl.arange(0, W, gl.SliceLayout(0, lines))[None, :]
    gl.store(out + place, gl.convert_layout(result, lines))
    return out_of_range(total)
