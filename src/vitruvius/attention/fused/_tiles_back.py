# mypy: ignore-errors
"""Triton building blocks for heads of any length, backward: tiles of columns are read as they are needed."""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._tiles import load_bias, load_bias_back, load_rows


@triton.jit
def chunk_back(
    grad_query, grad_key, grad_value, query, key, value, grad, lse, delta, rows, columns,
    other_query, other_key, other_value, other_grad, sums, deltas, bias, bias_stride, scale,
    N: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of columns into the gradients of the rows, which ask (query) and are asked (key, value) at once.

    The map P and its transpose are both seen from the row, so that no row writes into another's gradient. With
    SELF the queries are the keys: one product serves P and its transpose, and grad_key collects both.
    """
    other_lse = tl.load(sums + columns, mask=columns < N, other=float("inf"))
    other_delta = tl.load(deltas + columns, mask=columns < N, other=0.0)
    raw = tl.dot(query, tl.trans(other_key), input_precision=EXACT)
    push = tl.dot(grad, tl.trans(other_value), input_precision=EXACT)
    pull = tl.dot(value, tl.trans(other_grad), input_precision=EXACT)
    raw = raw * scale
    raw_back = raw
    if not SELF:
        raw_back = scale * tl.dot(key, tl.trans(other_query), input_precision=EXACT)
    if BIAS:
        raw = raw + load_bias(bias, rows, columns, bias_stride, N).to(tl.float32)
        raw_back = raw_back + load_bias_back(bias, rows, columns, bias_stride, N).to(tl.float32)
    back = tl.exp2(raw_back - other_lse[None, :])
    grad_value = tl.dot(back.to(other_grad.dtype), other_grad, grad_value, input_precision=EXACT)
    back = back * (pull - other_delta[None, :])
    there = tl.exp2(raw - lse[:, None]) * (push - delta[:, None])
    if SELF:
        grad_key = tl.dot((there + back).to(other_key.dtype), other_key, grad_key, input_precision=EXACT)
    else:
        grad_query = tl.dot(there.to(other_key.dtype), other_key, grad_query, input_precision=EXACT)
        grad_key = tl.dot(back.to(other_key.dtype), other_query, grad_key, input_precision=EXACT)
    return grad_query, grad_key, grad_value


@triton.jit
def fold_back(
    grad_query, grad_key, grad_value, query, key, value, grad, lse, delta, rows, columns,
    queries, query_stride, keys, key_stride, values, value_stride, grads, grad_stride, sums, deltas,
    bias, bias_stride, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, ALL: tl.constexpr,
    SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`chunk_back` for columns in memory."""
    other_key = load_rows(keys, columns, key_stride, N, D, W, ALL)
    other_value = load_rows(values, columns, value_stride, N, D, W, ALL)
    other_grad = load_rows(grads, columns, grad_stride, N, D, W, ALL)
    other_query = other_key
    if not SELF:
        other_query = load_rows(queries, columns, query_stride, N, D, W, ALL)
    return chunk_back(
        grad_query, grad_key, grad_value, query, key, value, grad, lse, delta, rows, columns,
        other_query, other_key, other_value, other_grad, sums, deltas, bias, bias_stride, scale,
        N, BIAS, SELF, EXACT,
    )  # fmt: skip


@triton.jit
def attend_back(
    grad_query, grad_key, grad_value, rows,
    queries, query_stride, keys, key_stride, values, value_stride, grads, grad_stride, sums, deltas,
    bias, bias_stride, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of query (SELF: nothing), key and value of some rows; the first two lack the scale."""
    key = load_rows(keys, rows, key_stride, N, D, W, False)
    value = load_rows(values, rows, value_stride, N, D, W, False)
    grad = load_rows(grads, rows, grad_stride, N, D, W, False)
    lse = tl.load(sums + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(deltas + rows, mask=rows < N, other=0.0)
    query = key
    if not SELF:
        query = load_rows(queries, rows, query_stride, N, D, W, False)
    for start in range(0, N // KEYS * KEYS, KEYS):
        grad_query, grad_key, grad_value = fold_back(
            grad_query, grad_key, grad_value, query, key, value, grad, lse, delta, rows,
            start + tl.arange(0, KEYS), queries, query_stride, keys, key_stride, values, value_stride, grads,
            grad_stride, sums, deltas, bias, bias_stride, scale, N, D, W, BIAS, True, SELF, EXACT,
        )  # fmt: skip
    if TAIL > 0:
        grad_query, grad_key, grad_value = fold_back(
            grad_query, grad_key, grad_value, query, key, value, grad, lse, delta, rows,
            N // KEYS * KEYS + tl.arange(0, TAIL), queries, query_stride, keys, key_stride, values, value_stride,
            grads, grad_stride, sums, deltas, bias, bias_stride, scale, N, D, W, BIAS, False, SELF, EXACT,
        )  # fmt: skip
    return grad_query, grad_key, grad_value
