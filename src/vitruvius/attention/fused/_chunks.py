# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, it does not unpack them)
"""Triton building blocks for heads that fit on the chip: the tokens in CHUNKS chunks of KEYS and one of TAIL.

A chunk stays in shared memory while the rows pass by.      N tokens, D width, W the power of two above D
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._tiles import load_bias, load_bias_back, load_rows


@triton.jit
def load_chunks(
    base, stride,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """All rows of a head."""
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunks = chunks + (load_rows(base, i * KEYS + tl.arange(0, KEYS), stride, N, D, W, True),)
    if TAIL > 0:
        chunks = chunks + (load_rows(base, CHUNKS * KEYS + tl.arange(0, TAIL), stride, N, D, W, False),)
    return chunks


@triton.jit
def attend_chunks(
    query, rows, keys, values, bias, bias_stride, scale,
    N: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """softmax(query keysᵀ) values for some rows, and the logarithm (base 2) of the sum; all scores at once."""
    scores = ()
    for i in tl.static_range(CHUNKS):
        scores = scores + (tl.dot(query, tl.trans(keys[i]), input_precision=EXACT),)
        if BIAS:
            columns = i * KEYS + tl.arange(0, KEYS)
            score = scores[i] * scale + load_bias(bias, rows, columns, bias_stride, N).to(tl.float32)
            scores = scores[:i] + (score,)
    if TAIL > 0:
        columns = CHUNKS * KEYS + tl.arange(0, TAIL)
        score = tl.dot(query, tl.trans(keys[CHUNKS]), input_precision=EXACT)
        if BIAS:
            score = score * scale + load_bias(bias, rows, columns, bias_stride, N).to(tl.float32)
        scores = scores + (tl.where((columns < N)[None, :], score, float("-inf")),)
    top = tl.max(scores[0], 1)
    for i in tl.static_range(1, CHUNKS + (TAIL > 0)):
        top = tl.maximum(top, tl.max(scores[i], 1))
    stretch = 1.0 if BIAS else scale
    top = top * stretch
    total = tl.zeros_like(top)
    out = tl.zeros((query.shape[0], query.shape[1]), tl.float32)
    for i in tl.static_range(CHUNKS + (TAIL > 0)):
        weights = tl.exp2(scores[i] * stretch - top[:, None])
        total += tl.sum(weights, 1)
        out = tl.dot(weights.to(query.dtype), values[i], out, input_precision=EXACT)
    return out / total[:, None], top + tl.log2(total)


@triton.jit
def chunk_back(
    slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows, columns,
    other_query, other_key, other_value, other_slope, sums, deltas, bias, bias_stride, scale,
    N: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of columns into the gradients of the rows, which ask (query) and are asked (key, value) at once.

    The map P and its transpose are both seen from the row, so that no row writes into another's gradient. With
    SELF the queries are the keys: one product serves P and its transpose, and slope_key collects both.
    """
    other_lse = tl.load(sums + columns, mask=columns < N, other=float("inf"))
    other_delta = tl.load(deltas + columns, mask=columns < N, other=0.0)
    raw = tl.dot(query, tl.trans(other_key), input_precision=EXACT)
    push = tl.dot(slope, tl.trans(other_value), input_precision=EXACT)
    pull = tl.dot(value, tl.trans(other_slope), input_precision=EXACT)
    raw = raw * scale
    raw_back = raw
    if not SELF:
        raw_back = scale * tl.dot(key, tl.trans(other_query), input_precision=EXACT)
    if BIAS:
        raw = raw + load_bias(bias, rows, columns, bias_stride, N).to(tl.float32)
        raw_back = raw_back + load_bias_back(bias, rows, columns, bias_stride, N).to(tl.float32)
    back = tl.exp2(raw_back - other_lse[None, :])
    slope_value = tl.dot(back.to(other_slope.dtype), other_slope, slope_value, input_precision=EXACT)
    back = back * (pull - other_delta[None, :])
    there = tl.exp2(raw - lse[:, None]) * (push - delta[:, None])
    if SELF:
        slope_key = tl.dot((there + back).to(other_key.dtype), other_key, slope_key, input_precision=EXACT)
    else:
        slope_query = tl.dot(there.to(other_key.dtype), other_key, slope_query, input_precision=EXACT)
        slope_key = tl.dot(back.to(other_key.dtype), other_query, slope_key, input_precision=EXACT)
    return slope_query, slope_key, slope_value


@triton.jit
def attend_back_chunks(
    slope_query, slope_key, slope_value, query, key, value, slope, rows, queries, keys, values, slopes,
    sums, deltas, bias, bias_stride, scale,
    N: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of query (SELF: nothing), key and value of some rows; the first two lack the scale."""
    lse = tl.load(sums + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(deltas + rows, mask=rows < N, other=0.0)
    for i in tl.static_range(CHUNKS):
        slope_query, slope_key, slope_value = chunk_back(
            slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows,
            i * KEYS + tl.arange(0, KEYS), queries[i], keys[i], values[i], slopes[i],
            sums, deltas, bias, bias_stride, scale, N, BIAS, SELF, EXACT,
        )  # fmt: skip
    if TAIL > 0:
        slope_query, slope_key, slope_value = chunk_back(
            slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows,
            CHUNKS * KEYS + tl.arange(0, TAIL), queries[CHUNKS], keys[CHUNKS], values[CHUNKS], slopes[CHUNKS],
            sums, deltas, bias, bias_stride, scale, N, BIAS, SELF, EXACT,
        )  # fmt: skip
    return slope_query, slope_key, slope_value
