# mypy: ignore-errors
"""Gluon kernel of principal attention pursuit, forward, for Hopper GPUs: all rows of a head at once.

Letters as in `fused/_pursuit.py`. k, w and L of a row stay with the thread that has the row (k in shared memory, for
want of registers); K' goes through shared memory, where all rows see it; nothing else moves between iterations. While a
head is worked on, keys and values of the next are under way. The sums of the weights are a product with ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from vitruvius.attention.fused.hopper._blocks import (
    barrier,
    clip,
    copy,
    from_mma,
    mma_layout,
    refine,
    shared_layout,
    to_mma,
    wide_layout,
)  # fmt: skip


@gluon.jit
def order(
    keys, values, k, v, head, count, k_b, k_h, k_n, v_b, v_h, v_n,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Send for keys and values of a head (beyond the last: of nothing)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [gl.num_warps(), 1], [1, 0])
    b = (head // H).to(gl.int64)
    h = (head % H).to(gl.int64)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = gl.arange(0, W, gl.SliceLayout(0, layout))
    inside = ((rows < N) & (head < count))[:, None] & (cols < D)[None, :]
    copy(keys, k + b * k_b + h * k_h + rows[:, None] * k_n + cols[None, :], inside)
    copy(values, v + b * v_b + h * v_h + rows[:, None] * v_n + cols[None, :], inside)
    async_copy.commit_group()


@gluon.jit
def fold(
    result, sums, query, keys, values, ones, anchor, stretch,
    START: gl.constexpr, KEYS: gl.constexpr, N: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Some keys into the weighted values and the sums of weights, which are relative to the anchor of each row."""
    layout: gl.constexpr = mma_layout(KEYS, gl.num_warps())
    left = gl.convert_layout(query, gl.DotOperandLayout(0, layout, 2))
    some = keys.slice(START, KEYS).permute((1, 0))
    raw = warpgroup_mma(left, some, gl.zeros([ROWS, KEYS], gl.float32, layout), use_acc=False)
    weights = gl.exp2(raw * stretch - gl.convert_layout(anchor, gl.SliceLayout(1, layout))[:, None])
    if START + KEYS > N:
        columns = START + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        weights = gl.where((columns < N)[None, :], weights, 0.0)
    weights = weights.to(query.dtype)
    left = gl.convert_layout(weights, gl.DotOperandLayout(0, mma_layout(8, gl.num_warps()), 2))
    sums = warpgroup_mma(left, ones.slice(0, KEYS), sums, is_async=True)
    left = gl.convert_layout(weights, gl.DotOperandLayout(0, mma_layout(W, gl.num_warps()), 2))
    result = warpgroup_mma(left, values.slice(START, KEYS), result, is_async=True)
    return warpgroup_mma_wait(0, deps=(result, sums))


@gluon.jit
def attend(
    query, keys, values, ones, anchor, stretch,
    N: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """softmax(query keysᵀ) values, and the sums of the weights; keys in chunks of KEYS and one of TAIL."""
    CHUNKS: gl.constexpr = N // KEYS
    wide: gl.constexpr = mma_layout(W, gl.num_warps())
    result = gl.zeros([ROWS, W], gl.float32, wide)
    sums = gl.zeros([ROWS, 8], gl.float32, mma_layout(8, gl.num_warps()))
    for i in gl.static_range(CHUNKS):
        result, sums = fold(
            result, sums, query, keys, values, ones, anchor, stretch, i * KEYS, KEYS, N, W, ROWS
        )  # fmt: skip
    if TAIL > 0:
        result, sums = fold(
            result, sums, query, keys, values, ones, anchor, stretch, CHUNKS * KEYS, TAIL, N, W, ROWS
        )  # fmt: skip
    total = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, wide))  # eight equal columns
    return result * (1.0 / total)[:, None], total


@gluon.jit(do_not_specialize=["iterations", "count"])
def pursue(
    k, v, out, low, sums, taus, flags,
    k_b, k_h, k_n, v_b, v_h, v_n, step_stride, count, iterations, coefficient, scale,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, TAIL: gl.constexpr, SIGN: gl.constexpr, CLIP: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """All iterations of all heads. Flags: 1, a key is very long (`fused/_pursuit_whole.py`), 2, some were clipped."""
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k.dtype.element_ty
    wide: gl.constexpr = wide_layout(ROWS, W)
    mma: gl.constexpr = mma_layout(W, WARPS)
    shared: gl.constexpr = shared_layout(W)
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, W // 8, [1, 0])
    stretch = scale * 1.4426950408889634
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    cols = gl.arange(0, W, gl.SliceLayout(0, wide))
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    here = gl.arange(0, ROWS, gl.SliceLayout(1, mma))
    cleans = gl.allocate_shared_memory(dtype, [2, ROWS, W], shared)
    values = gl.allocate_shared_memory(dtype, [ROWS, W], shared)
    keys = gl.allocate_shared_memory(dtype, [2, ROWS, W], plain)
    arriving = gl.allocate_shared_memory(dtype, [ROWS, W], plain)
    ones = gl.allocate_shared_memory(
        dtype, [KEYS, 8], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    )
    ones.store(gl.full([KEYS, 8], 1.0, dtype, gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])))
    place = 0
    order(
        keys.index(0), arriving, k, v, gl.program_id(0), count, k_b, k_h, k_n, v_b, v_h, v_n, N, D, W, H, ROWS
    )  # fmt: skip
    for head in range(gl.program_id(0), count, gl.num_programs(0)):
        flat = (head // H).to(gl.int64) * (N * H * D) + (head % H).to(gl.int64) * D
        ours = keys.index(place)
        async_copy.wait_group(0)
        barrier()
        values.store(to_mma(gl.where(inside, arriving.load(wide), 0.0), ROWS, W, mma))
        key = to_mma(gl.where(inside, ours.load(wide), 0.0), ROWS, W, mma).to(gl.float32)
        barrier()
        place = 1 - place
        order(
            keys.index(place), arriving, k, v, head + gl.num_programs(0), count, k_b, k_h, k_n, v_b, v_h, v_n,
            N, D, W, H, ROWS,
        )  # fmt: skip
        tau = 0.0
        if CLIP:
            mean = gl.maximum(gl.sum(gl.sum(gl.abs(key), 1), 0) / (N * D), 1.0842021724855044e-19)
            tau = coefficient / mean if INVERSE else coefficient * mean
            gl.store(taus + head, tau)
        mixed = clip(key, tau, CLIP)
        clean = mixed.to(dtype)
        greatest = gl.max(gl.abs(key), 1)
        longest_ever = 0.0
        for step in range(iterations):
            seen = cleans.index(step % 2)
            seen.store(clean)
            single = clean.to(gl.float32)
            square = gl.sum(single * single, 1)
            fence_async_shared()
            longest = gl.sqrt(gl.max(gl.where(here < N, square, 0.0), 0))
            longest_ever = gl.maximum(longest_ever, longest)
            anchor = gl.maximum(stretch * square, stretch * longest * gl.sqrt(square) - 100.0)
            result, total = attend(clean, seen, values, ones, anchor, stretch, N, W, ROWS, KEYS, TAIL)
            found = result.to(dtype)
            gl.store(sums + (step * count + head) * N + here, anchor + gl.log2(total), mask=here < N)
            target = out + flat
            if step < iterations - 1:
                target = low + flat + step * step_stride.to(gl.int64)
            gl.store(target + rows[:, None] * (H * D) + cols[None, :], from_mma(found, ROWS, W, wide), mask=inside)
            if step < iterations - 1:
                again = ours.load(wide)
                if D < W:
                    again = gl.where(inside, again, 0.0)
                key = to_mma(again, ROWS, W, mma).to(gl.float32)
                z, next_clean, mixed = refine(key, mixed, found.to(gl.float32), tau, SIGN, CLIP)
                clean = next_clean.to(dtype)
                if CLIP:
                    greatest = gl.maximum(greatest, gl.max(gl.abs(z), 1))
        flag = (stretch * longest_ever * longest_ever > 800.0).to(gl.int32)
        if CLIP:
            clipped = gl.max(gl.where(here < N, greatest, 0.0), 0) > tau
            flag = flag * 3 | clipped.to(gl.int32) * 2  # whoever is done again may be clipped
        gl.store(flags + head, flag)
