# mypy: ignore-errors
"""Triton kernels of attention under a fixed pattern: a tile of rows reads only the columns that it keeps.

N queries, M keys, D width, W the power of two above D. Rows and columns come from the lists of `_pattern.py`: the
rows of a tile, the blocks of columns they need (beyond the last: N or M), and a word of bits for each row and block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._tiles import load_rows, store_rows


@triton.jit
def kept(bits, block, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """(ROWS, KEYS) bools of one block."""
    words = tl.load(bits + block * ROWS + tl.arange(0, ROWS))
    return ((words[:, None] >> tl.arange(0, KEYS)[None, :].to(words.dtype)) & 1) != 0


@triton.jit
def look(
    q, k, v, out, sums, order, first, columns, bits,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, tiles, scale,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ · scale) v over the kept keys, for one tile of queries.

    LONG: the first tiles of all heads come first, because dense rows make them the longest work; else the tiles of a
    head come together and share its keys in the cache. (A loop of one turn makes the long form a tenth faster.)
    """
    head = tl.program_id(0 if LONG else 1)
    if LONG:
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            look_at_tile(
                tile, tiles, head, q, k, v, out, sums, order, first, columns, bits,
                q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, scale, N, M, D, W, H, ROWS, KEYS, EXACT,
            )  # fmt: skip
    else:
        look_at_tile(
            tl.program_id(0), tiles, head, q, k, v, out, sums, order, first, columns, bits,
            q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, scale, N, M, D, W, H, ROWS, KEYS, EXACT,
        )  # fmt: skip


@triton.jit
def look_at_tile(
    tile, tiles, head, q, k, v, out, sums, order, first, columns, bits,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, scale,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    place = h * tiles + tile
    rows = tl.load(order + place * ROWS + tl.arange(0, ROWS))
    begin = tl.load(first + place)
    end = tl.load(first + place + 1)
    query = load_rows(q + b * q_b + h * q_h, rows, q_n, N, D, W, False)
    stretch = scale * 1.4426950408889634
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, W), tl.float32)
    for block in range(begin, end):
        others = tl.load(columns + block * KEYS + tl.arange(0, KEYS))
        key = load_rows(k + b * k_b + h * k_h, others, k_n, M, D, W, False)
        value = load_rows(v + b * v_b + h * v_h, others, v_n, M, D, W, False)
        raw = tl.dot(query, tl.trans(key), input_precision=EXACT)
        raw = tl.where(kept(bits, block, ROWS, KEYS), raw, float("-inf"))
        peak = tl.maximum(top, tl.max(raw, 1) * stretch)
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(raw * stretch - anchor[:, None])
        fade = tl.exp2(top - anchor)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(weights.to(value.dtype), value, result * fade[:, None], input_precision=EXACT)
        top = peak
    total = tl.maximum(total, 1e-30)  # places to spare keep nothing
    store_rows(out + b * (N * H * D) + h * D, rows, H * D, result * (1.0 / total)[:, None], N, D, W)
    tl.store(sums + head * N + rows, top + tl.log2(total), mask=rows < N)


@triton.jit
def look_back(
    q, k, v, out, sums, grad_out, grad_q, grad_k, grad_v,
    order, first, columns, bits, back_order, back_first, back_columns, back_bits,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, tiles, back_tiles, scale,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries, or of one tile of keys and values: the programs share these tasks."""
    task = tl.program_id(1 if LONG else 0)
    head = tl.program_id(0 if LONG else 1)
    b = tl.cast(head // H, tl.int64)
    h = tl.cast(head % H, tl.int64)
    queries = q + b * q_b + h * q_h
    keys = k + b * k_b + h * k_h
    values = v + b * v_b + h * v_h
    grads = grad_out + b * o_b + h * o_h
    outs = out + b * (N * H * D) + h * D
    if task < tiles:
        place = h * tiles + task
        query_back(
            queries, q_n, keys, k_n, values, v_n, outs, H * D, grads, o_n, sums + head * N, grad_q + b * (N * H * D)
            + h * D, order + place * ROWS, tl.load(first + place), tl.load(first + place + 1), columns, bits, scale,
            N, M, D, W, ROWS, KEYS, EXACT,
        )  # fmt: skip
    else:
        place = h * back_tiles + (task - tiles)
        flat = b * (M * H * D) + h * D
        key_back(
            queries, q_n, keys, k_n, values, v_n, outs, H * D, grads, o_n, sums + head * N, grad_k + flat,
            grad_v + flat, H * D, back_order + place * ROWS, tl.load(back_first + place),
            tl.load(back_first + place + 1), back_columns, back_bits, scale, N, M, D, W, ROWS, KEYS, EXACT,
        )  # fmt: skip


@triton.jit
def query_back(
    queries, q_n, keys, k_n, values, v_n, outs, out_n, grads, o_n, sums, grad_q, order, begin, end, columns, bits,
    scale,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries."""
    rows = tl.load(order + tl.arange(0, ROWS))
    query = load_rows(queries, rows, q_n, N, D, W, False)
    grad = load_rows(grads, rows, o_n, N, D, W, False)
    delta = tl.sum(grad.to(tl.float32) * load_rows(outs, rows, out_n, N, D, W, False).to(tl.float32), 1)
    lse = tl.load(sums + rows, mask=rows < N, other=float("inf"))
    result = tl.zeros((ROWS, W), tl.float32)
    for block in range(begin, end):
        others = tl.load(columns + block * KEYS + tl.arange(0, KEYS))
        key = load_rows(keys, others, k_n, M, D, W, False)
        value = load_rows(values, others, v_n, M, D, W, False)
        raw = scale * 1.4426950408889634 * tl.dot(query, tl.trans(key), input_precision=EXACT)
        push = tl.dot(grad, tl.trans(value), input_precision=EXACT)
        weights = tl.where(kept(bits, block, ROWS, KEYS), tl.exp2(raw - lse[:, None]), 0.0)
        result = tl.dot((weights * (push - delta[:, None])).to(key.dtype), key, result, input_precision=EXACT)
    store_rows(grad_q, rows, out_n, scale * result, N, D, W)


@triton.jit
def key_back(
    queries, q_n, keys, k_n, values, v_n, outs, out_n, grads, o_n, sums, grad_k, grad_v, grad_n,
    order, begin, end, columns, bits, scale,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values."""
    rows = tl.load(order + tl.arange(0, ROWS))
    key = load_rows(keys, rows, k_n, M, D, W, False)
    value = load_rows(values, rows, v_n, M, D, W, False)
    result_k = tl.zeros((ROWS, W), tl.float32)
    result_v = tl.zeros((ROWS, W), tl.float32)
    for block in range(begin, end):
        others = tl.load(columns + block * KEYS + tl.arange(0, KEYS))
        query = load_rows(queries, others, q_n, N, D, W, False)
        grad = load_rows(grads, others, o_n, N, D, W, False)
        out = load_rows(outs, others, out_n, N, D, W, False)
        lse = tl.load(sums + others, mask=others < N, other=float("inf"))
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        raw = scale * 1.4426950408889634 * tl.dot(key, tl.trans(query), input_precision=EXACT)
        pull = tl.dot(value, tl.trans(grad), input_precision=EXACT)
        weights = tl.where(kept(bits, block, ROWS, KEYS), tl.exp2(raw - lse[None, :]), 0.0)
        result_v = tl.dot(weights.to(grad.dtype), grad, result_v, input_precision=EXACT)
        result_k = tl.dot((weights * (pull - delta[None, :])).to(query.dtype), query, result_k, input_precision=EXACT)
    store_rows(grad_k, rows, grad_n, scale * result_k, M, D, W)
    store_rows(grad_v, rows, grad_n, result_v, M, D, W)
