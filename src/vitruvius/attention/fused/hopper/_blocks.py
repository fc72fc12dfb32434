# mypy: ignore-errors
"""Gluon building blocks for Hopper GPUs: whole heads in shared memory, products by warpgroups.

Gluon is Triton with layouts in the programmer's hand; its names change between versions, and this file hides that.
Rows of a head are read and written in the layout `wide`: a thread has W / 4 neighbouring columns of two rows. Products
want their columns dealt out to threads in pairs. Both are the same registers under two namings of the columns, so
`to_mma` and `from_mma` move nothing; the naming is the same for all tensors of a kernel and never seen outside.
W: width, 32 or 64
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory in another shape."""
        return memory.reinterpret(dtype, shape, layout)

    @gluon.jit
    def rows_at(buffer, START: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
        """ROWS rows of a buffer (n, 8, W) from row 8 · START on."""
        return view(buffer.slice(START, ROWS // 8), buffer.dtype, [ROWS, W], shared_layout(W))

    @gluon.jit
    def window(buffer, start, W: gl.constexpr):
        """32 rows of a buffer (n, 8, W) from row 8 · start on. Views may not grow: the rows before are cut off."""
        rows = _window(buffer, start, 0, W)
        if start % 4 == 1:
            rows = _window(buffer, start, 1, W)
        if start % 4 == 2:
            rows = _window(buffer, start, 2, W)
        if start % 4 == 3:
            rows = _window(buffer, start, 3, W)
        return rows

    @gluon.jit
    def _window(buffer, start, FIRST: gl.constexpr, W: gl.constexpr):
        COUNT: gl.constexpr = (buffer.shape[0] - FIRST) // 4
        rest = buffer.slice(FIRST, 4 * COUNT)
        return view(rest, buffer.dtype, [COUNT, 32, W], shared_layout(W)).index(start // 4)

else:

    @gluon.jit
    def view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory in another shape."""
        return memory._reinterpret(dtype, shape, layout)

    @gluon.jit
    def rows_at(buffer, START: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
        """ROWS rows of a buffer (n, 8, W) from row 8 · START on."""
        return view(buffer.index(START), buffer.dtype, [ROWS, W], shared_layout(W))

    @gluon.jit
    def window(buffer, start, W: gl.constexpr):
        """32 rows of a buffer (n, 8, W) from row 8 · start on."""
        return view(buffer.index(start), buffer.dtype, [32, W], shared_layout(W))


@gluon.constexpr_function
def wide_layout(rows, W):
    """Layout of (rows, W) in which a thread has W / 4 neighbours of two rows, 8 rows apart."""
    neighbours = [[0, 1 << bit] for bit in range((W // 4).bit_length() - 1)]
    warps = [[1 << bit, 0] for bit in range(4, rows.bit_length() - 1)]
    lanes = [[0, W // 4], [0, W // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*neighbours, [8, 0]], lanes, warps, [], [rows, W])


@gluon.constexpr_function
def mma_layout(columns, warps):
    """Layout of a product that is `columns` wide, 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def shared_layout(W):
    """Rows of W numbers of 16 bits as the products read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * W, element_bitwidth=16, rank=2)


@gluon.jit
def to_mma(x, ROWS: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    return gl.convert_layout(x.reshape(ROWS, 4, W // 8, 2).permute(0, 2, 1, 3).reshape(ROWS, W), layout)


@gluon.jit
def from_mma(x, ROWS: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    return gl.convert_layout(x.reshape(ROWS, W // 8, 4, 2).permute(0, 2, 1, 3).reshape(ROWS, W), layout)


@gluon.jit
def clip(x, tau, CLIP: gl.constexpr):
    if CLIP:
        x = gl.minimum(gl.maximum(x, -tau), tau)
    return x


@gluon.jit
def refine(key, mixed, low, tau, SIGN: gl.constexpr, CLIP: gl.constexpr):
    """(z before clipping, K', next w) from k, w and L, as in `fused/_pursuit.py`."""
    z = key + mixed - 2.0 * low
    clipped = clip(z, tau, CLIP)
    return z, clipped + (2 - SIGN) * low + (SIGN - 1) * mixed, clipped + low
