# mypy: ignore-errors

"""Gluon kernel of principal attention pursuit, backward, for Hopper GPUs: all iterations of a head in one program.

Letters and rules as in `fused/_pursuit_back.py`. K', values and gradients of L of a head lie in shared memory; tiles of
rows pass by, each seen as asking and asked at once. What the rules carry from an iteration to the one before (gradients
of w and L, sums for k and v) waits in memory: in a scratch of the program, small enough for the second cache, or where
it ends. Two programs share a multiprocessor, so that one computes while the other waits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from vitruvius.attention.fused.hopper._backward_blocks import (
    fetch_grads,
    gather,
    get,
    get_tiles,
    multiply,
    put,
    put_cleans,
    rehearse,
    retreat,
    share_out_if,
    weigh,
)
from vitruvius.attention.fused.hopper._blocks import (
    barrier,
    mma_layout,
    shared_layout,
    to_mma,
    view,
    wide_layout,
)


@gluon.jit(do_not_specialize=["iterations", "count"])
def pursue_back(
    k, v, out, low, sums, taus, flags, grad_out, grad_k, grad_v, scratch, scratch_deltas,
    k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, step_stride, count, iterations, coefficient, scale,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, TILES: gl.constexpr, KEYS: gl.constexpr,
    SIGN: gl.constexpr, CLIP: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """Gradients of k and v of all heads. Scratch of a program: all K' and cuts, gradients of L and of w."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    CHUNKS: gl.constexpr = (N + KEYS - 1) // KEYS
    PLACES: gl.constexpr = TILES * ROWS // KEYS
    LAST: gl.constexpr = CHUNKS - 1
    dtype: gl.constexpr = k.dtype.element_ty
    wide: gl.constexpr = wide_layout(ROWS, W)
    mma: gl.constexpr = mma_layout(W, WARPS)
    narrow: gl.constexpr = mma_layout(KEYS, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    shared: gl.constexpr = shared_layout(W)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stretch = scale * 1.4426950408889634
    every = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    cleans = gl.allocate_shared_memory(dtype, [PLACES, KEYS, W], shared)  # the same memory by chunks and by tiles
    values = gl.allocate_shared_memory(dtype, [PLACES, KEYS, W], shared)
    grads = gl.allocate_shared_memory(dtype, [PLACES, KEYS, W], shared)
    lses = gl.allocate_shared_memory(gl.float32, [PLACES, KEYS], line)
    deltas = gl.allocate_shared_memory(gl.float32, [PLACES, KEYS], line)
    tile_cleans = view(cleans, dtype, [TILES, ROWS, W], shared)
    tile_values = view(values, dtype, [TILES, ROWS, W], shared)
    tile_grads = view(grads, dtype, [TILES, ROWS, W], shared)
    tile_lses = view(lses, gl.float32, [TILES, ROWS], line)
    tile_deltas = view(deltas, gl.float32, [TILES, ROWS], line)
    slot = gl.program_id(0)
    our_cleans = scratch + slot.to(gl.int64) * (2 * iterations + 2) * (N * D)
    our_cuts = our_cleans + iterations * (N * D)
    our_grads = our_cuts + iterations * (N * D)
    our_mixes = our_grads + N * D
    our_deltas = scratch_deltas + slot * N

    for head in range(slot, count, gl.num_programs(0)):
        b = (head // H).to(gl.int64)
        h = (head % H).to(gl.int64)
        flat = b * (N * H * D) + h * D
        tau = 0.0
        clipped = False
        if CLIP:
            tau = gl.load(taus + head)
            clipped = gl.load(flags + head) > 1
        for tile in range(TILES):
            rows = every + tile * ROWS
            value = get(v + b * v_b + h * v_h, rows, v_n, True, N, D, W, wide)
            grad = get(grad_out + b * o_b + h * o_h, rows, o_n, True, N, D, W, wide)
            last = get(out + flat, rows, H * D, True, N, D, W, wide)
            key = get(k + b * k_b + h * k_h, rows, k_n, True, N, D, W, wide)
            first = get(low + flat, rows, H * D, iterations > 1, N, D, W, wide)
            second = get(low + flat + step_stride.to(gl.int64), rows, H * D, iterations > 2, N, D, W, wide)
            tile_values.index(tile).store(to_mma(value, ROWS, W, mma))
            tile_grads.index(tile).store(to_mma(grad, ROWS, W, mma))
            tile_deltas.index(tile).store(gl.sum(grad.to(gl.float32) * last.to(gl.float32), 1))
            rehearse(
                rows, iterations, key, first, second, low + flat, step_stride, our_cleans, our_cuts, clipped, tau,
                N, D, W, H, SIGN, CLIP, wide,
            )  # fmt: skip
        pulls = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, mma))
        for turn in range(iterations):
            step = iterations - 1 - turn
            barrier()
            fetched = get_tiles(our_cleans + step * (N * D), every, N, D, W, ROWS, TILES, wide)
            if turn > 0:
                fetch_grads(tile_grads, tile_deltas, our_grads, our_deltas, every, N, D, W, ROWS, TILES, wide, mma)
            put_cleans(
                tile_cleans, tile_lses, fetched, sums + (step * count + head) * N, every, N, W, ROWS, TILES, mma
            )  # fmt: skip
            fence_async_shared()
            barrier()
            for tile in range(TILES):
                rows = every + tile * ROWS
                row_lse = tile_lses.index(tile).load(gl.SliceLayout(1, narrow))
                row_delta = tile_deltas.index(tile).load(gl.SliceLayout(1, narrow))
                row_key = tile_cleans.index(tile).load(left)
                row_grad = tile_grads.index(tile).load(left)
                row_value = tile_values.index(tile).load(left)
                sum_k = gl.zeros([ROWS, W], gl.float32, mma)
                sum_v = gl.zeros([ROWS, W], gl.float32, mma)
                raw, push, pull = multiply(
                    row_key, row_grad, row_value, cleans.index(0), grads.index(0), values.index(0), ROWS, KEYS
                )
                raw, push, pull = warpgroup_mma_wait(0, deps=(raw, push, pull))
                for i in range(LAST):
                    back, both = weigh(
                        raw, push, pull, row_lse, row_delta, lses.index(i), deltas.index(i), stretch, dtype, KEYS, W
                    )
                    sum_v = warpgroup_mma(back, grads.index(i), sum_v, is_async=True)
                    sum_k = warpgroup_mma(both, cleans.index(i), sum_k, is_async=True)
                    raw, push, pull = multiply(
                        row_key, row_grad, row_value, cleans.index(i + 1), grads.index(i + 1), values.index(i + 1),
                        ROWS, KEYS,
                    )  # fmt: skip
                    sum_v, sum_k, raw, push, pull = warpgroup_mma_wait(0, deps=(sum_v, sum_k, raw, push, pull))
                later_v = get(grad_v + flat, rows, H * D, turn > 0, N, D, W, wide)  # as soon as registers are free
                mix = get(our_mixes, rows, D, turn > 0, N, D, W, wide)
                cut = get(our_cuts + step * (N * D), rows, D, clipped, N, D, W, wide) if CLIP else mix
                back, both = weigh(
                    raw, push, pull, row_lse, row_delta, lses.index(LAST), deltas.index(LAST), stretch, dtype, KEYS, W
                )
                sum_v = warpgroup_mma(back, grads.index(LAST), sum_v, is_async=True)
                sum_k = warpgroup_mma(both, cleans.index(LAST), sum_k, is_async=True)
                later_k = get(grad_k + flat, rows, H * D, turn > 0, N, D, W, wide)
                before = get(low + flat + (step - 1) * step_stride.to(gl.int64), rows, H * D, step > 0, N, D, W, wide)
                sum_v, sum_k = warpgroup_mma_wait(0, deps=(sum_v, sum_k))
                put(grad_v + flat, rows, H * D, gather(sum_v, later_v, ROWS, W, mma, wide), N, D, W, wide)
                pulls += retreat(
                    step, rows, sum_k * scale, later_k, mix, cut, before, grad_k + flat, our_mixes, our_grads,
                    our_deltas, N, D, W, H, ROWS, SIGN, CLIP, mma, wide,
                )  # fmt: skip
        if CLIP:  # apart from `clipped`: Triton 3.6 does not compile a branch that is never taken
            share_out_if(
                clipped, pulls, tau, coefficient, k + b * k_b + h * k_h, k_n, grad_k + flat, every,
                N, D, W, H, ROWS, TILES, INVERSE, wide,
            )  # fmt: skip
        barrier()
