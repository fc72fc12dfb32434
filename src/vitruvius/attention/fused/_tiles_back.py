# mypy: ignore-errors
"""Triton building blocks for heads of any length, backward: tiles of columns are read as they are needed."""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._chunks import chunk_back
from vitruvius.attention.fused._tiles import load_rows


@triton.jit
def fold_back(
    slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows, columns,
    queries, query_stride, keys, key_stride, values, value_stride, slopes, slope_stride, sums, deltas,
    bias, bias_stride, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, ALL: tl.constexpr,
    SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`chunk_back` for columns in memory."""
    other_key = load_rows(keys, columns, key_stride, N, D, W, ALL)
    other_value = load_rows(values, columns, value_stride, N, D, W, ALL)
    other_slope = load_rows(slopes, columns, slope_stride, N, D, W, ALL)
    other_query = other_key
    if not SELF:
        other_query = load_rows(queries, columns, query_stride, N, D, W, ALL)
    return chunk_back(
        slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows, columns,
        other_query, other_key, other_value, other_slope, sums, deltas, bias, bias_stride, scale,
        N, BIAS, SELF, EXACT,
    )  # fmt: skip


@triton.jit
def attend_back(
    slope_query, slope_key, slope_value, rows,
    queries, query_stride, keys, key_stride, values, value_stride, slopes, slope_stride, sums, deltas,
    bias, bias_stride, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of query (SELF: nothing), key and value of some rows; the first two lack the scale."""
    key = load_rows(keys, rows, key_stride, N, D, W, False)
    value = load_rows(values, rows, value_stride, N, D, W, False)
    slope = load_rows(slopes, rows, slope_stride, N, D, W, False)
    lse = tl.load(sums + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(deltas + rows, mask=rows < N, other=0.0)
    query = key
    if not SELF:
        query = load_rows(queries, rows, query_stride, N, D, W, False)
    for start in range(0, N // KEYS * KEYS, KEYS):
        slope_query, slope_key, slope_value = fold_back(
            slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows,
            start + tl.arange(0, KEYS), queries, query_stride, keys, key_stride, values, value_stride, slopes,
            slope_stride, sums, deltas, bias, bias_stride, scale, N, D, W, BIAS, True, SELF, EXACT,
        )  # fmt: skip
    if TAIL > 0:
        slope_query, slope_key, slope_value = fold_back(
            slope_query, slope_key, slope_value, query, key, value, slope, lse, delta, rows,
            N // KEYS * KEYS + tl.arange(0, TAIL), queries, query_stride, keys, key_stride, values, value_stride,
            slopes, slope_stride, sums, deltas, bias, bias_stride, scale, N, D, W, BIAS, False, SELF, EXACT,
        )  # fmt: skip
    return slope_query, slope_key, slope_value
