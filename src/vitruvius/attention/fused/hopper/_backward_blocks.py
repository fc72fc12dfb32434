# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, it does not unpack them)
"""Gluon blocks of the pursuit's backward pass on Hopper GPUs: rows from and to memory, K' again, products and weights.

Letters as in `fused/_pursuit_back.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from vitruvius.attention.fused.hopper._blocks import clip, from_mma, mma_layout, refine, to_mma


@gluon.jit
def get(base, rows, stride, some, N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """(rows, W) entries from `base`, zero beyond N and D, and everywhere unless `some`."""
    cols = gl.arange(0, W, gl.SliceLayout(0, layout))
    inside = ((rows < N) & some)[:, None] & (cols < D)[None, :]
    return gl.load(base + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def put(base, rows, stride, tile, N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    cols = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(base + rows[:, None] * stride + cols[None, :], tile, mask=(rows < N)[:, None] & (cols < D)[None, :])


@gluon.jit
def rehearse(
    rows, iterations, key, first, second, low, step_stride, cleans, cuts, clipped, tau,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, SIGN: gl.constexpr, CLIP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """K' of some rows in every iteration, and what clipping cut off, if anything in this head was clipped."""
    if not CLIP:
        replay(
            rows, iterations, key, first, second, low, step_stride, cleans, cuts, tau, N, D, W, H, SIGN, False, layout
        )  # fmt: skip
    elif clipped:
        replay(
            rows, iterations, key, first, second, low, step_stride, cleans, cuts, tau, N, D, W, H, SIGN, True, layout
        )  # fmt: skip
    else:
        replay(
            rows, iterations, key, first, second, low, step_stride, cleans, cuts, tau, N, D, W, H, SIGN, False, layout
        )  # fmt: skip


@gluon.jit
def replay(
    rows, iterations, key, first, second, low, step_stride, cleans, cuts, tau,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, SIGN: gl.constexpr, CLIP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The iterations again, from L alone; `first`, `second`: L of the first two, the others are read as they come."""
    z = key.to(gl.float32)
    clean = clip(z, tau, CLIP)
    mixed = clean
    for step in range(iterations):
        put(cleans + step * (N * D), rows, D, clean.to(key.dtype), N, D, W, layout)
        if CLIP:
            put(cuts + step * (N * D), rows, D, (z - clip(z, tau, CLIP)).to(key.dtype), N, D, W, layout)
        if step + 1 < iterations:
            third = get(
                low + (step + 2) * step_stride.to(gl.int64), rows, H * D, step + 3 < iterations, N, D, W, layout
            )
            z, clean, mixed = refine(key.to(gl.float32), mixed, first.to(gl.float32), tau, SIGN, CLIP)
            first = second
            second = third


@gluon.jit
def multiply(key, grad, value, keys, grads, values, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Send off K'K'ᵀ, g_L vᵀ and v g_Lᵀ of some rows (left) and columns (right)."""
    layout: gl.constexpr = mma_layout(KEYS, gl.num_warps())
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout)
    raw = warpgroup_mma(key, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
    push = warpgroup_mma(grad, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
    pull = warpgroup_mma(value, grads.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return raw, push, pull


@gluon.jit
def weigh(raw, push, pull, lse, delta, lses, deltas, stretch, dtype: gl.constexpr, KEYS: gl.constexpr, W: gl.constexpr):
    """Weights of the columns' attention to the rows, and the gradients of the scores both ways."""
    layout: gl.constexpr = mma_layout(KEYS, gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(W, gl.num_warps()), 2)
    other_lse = lses.load(gl.SliceLayout(0, layout))
    other_delta = deltas.load(gl.SliceLayout(0, layout))
    back = gl.exp2(raw * stretch - other_lse[None, :])
    there = gl.exp2(raw * stretch - lse[:, None])
    both = there * (push - delta[:, None]) + back * (pull - other_delta[None, :])
    return gl.convert_layout(back.to(dtype), left), gl.convert_layout(both.to(dtype), left)


@gluon.jit
def get_tiles(
    base, every, N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """All tiles of a head, whose rows lie one after the other."""
    tiles = ()
    for each in gl.static_range(TILES):
        tiles = tiles + (get(base, every + each * ROWS, D, True, N, D, W, layout),)
    return tiles


@gluon.jit
def put_cleans(
    tile_cleans, tile_lses, cleans, sums, every,
    N: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """K' of one iteration and its log-sums into shared memory."""
    for each in gl.static_range(TILES):
        rows = every + each * ROWS
        tile_cleans.index(each).store(to_mma(cleans[each], ROWS, W, mma))
        tile_lses.index(each).store(gl.load(sums + rows, mask=rows < N, other=float("inf")))


@gluon.jit
def share_out_if(
    clipped, pulls, tau, coefficient, keys, k_n, grads, every,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    INVERSE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`share_out` for a head of which something was clipped."""
    if clipped:
        rate = -tau / coefficient * tau if INVERSE else coefficient
        share_out(gl.sum(pulls, 0), rate, keys, k_n, grads, every, N, D, W, H, ROWS, TILES, layout)


@gluon.jit
def share_out(
    pull, rate, keys, k_n, grads, every,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """What pulls on tau, shared out to the keys, whose mean size tau is made of; rate: tau's growth with that mean."""
    share = gl.where(pull == 0.0, 0.0, pull * rate / (N * D))
    if share != 0.0:
        fetched = ()
        for tile in gl.static_range(TILES):
            rows = every + tile * ROWS
            fetched = fetched + (get(keys, rows, k_n, True, N, D, W, layout),)
            fetched = fetched + (get(grads, rows, H * D, True, N, D, W, layout),)
        for tile in gl.static_range(TILES):
            key = fetched[2 * tile].to(gl.float32)
            toward = gl.where(key > 0.0, share, gl.where(key < 0.0, -share, 0.0))
            grad = (fetched[2 * tile + 1].to(gl.float32) + toward).to(grads.dtype.element_ty)
            put(grads, every + tile * ROWS, H * D, grad, N, D, W, layout)


@gluon.jit
def fetch_grads(
    tile_grads, tile_deltas, grads, deltas, every,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    layout: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Gradients of L, as the iteration after has left them, into shared memory."""
    fetched = ()
    for tile in gl.static_range(TILES):
        fetched = fetched + (get(grads, every + tile * ROWS, D, True, N, D, W, layout),)
    for tile in gl.static_range(TILES):
        rows = every + tile * ROWS
        tile_grads.index(tile).store(to_mma(fetched[tile], ROWS, W, mma))
        tile_deltas.index(tile).store(gl.load(deltas + rows, mask=rows < N, other=0.0))


@gluon.jit
def gather(new, later, ROWS: gl.constexpr, W: gl.constexpr, mma: gl.constexpr, layout: gl.constexpr):
    """What an iteration gives, with what the later ones gave."""
    return from_mma((to_mma(later, ROWS, W, mma).to(gl.float32) + new).to(later.dtype), ROWS, W, layout)


@gluon.jit
def retreat(
    step, rows, grad_key, later_k, mix, cut, before, grad_k, mixes, grads, deltas,
    N: gl.constexpr, D: gl.constexpr, W: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr, SIGN: gl.constexpr,
    CLIP: gl.constexpr, mma: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """After attention's backward pass: gradients of k, of w and of the L before. Returns the rows' pulls on tau."""
    grad_mixed = to_mma(mix, ROWS, W, mma).to(gl.float32)
    grad_z = grad_key + grad_mixed
    pulls = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, mma))
    if CLIP:
        side = to_mma(cut, ROWS, W, mma).to(gl.float32)
        pulls = gl.sum(gl.where(side > 0.0, grad_z, gl.where(side < 0.0, -grad_z, 0.0)), 1)
        grad_z = gl.where(side == 0.0, grad_z, 0.0)
    put(grad_k, rows, H * D, gather(grad_z, later_k, ROWS, W, mma, layout), N, D, W, layout)
    if step > 0:
        next_mix = (grad_z + (SIGN - 1) * grad_key).to(mix.dtype)
        put(mixes, rows, D, from_mma(next_mix, ROWS, W, layout), N, D, W, layout)
        next_grad = ((2 - SIGN) * grad_key - 2.0 * grad_z + grad_mixed).to(mix.dtype)
        next_grad = from_mma(next_grad, ROWS, W, layout)
        put(grads, rows, D, next_grad, N, D, W, layout)
        delta = gl.sum(next_grad.to(gl.float32) * before.to(gl.float32), 1)
        gl.store(deltas + rows, delta, mask=rows < N)
    return pulls
