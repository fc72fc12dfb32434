# mypy: ignore-errors
"""Triton building blocks: rows of a head, attention of some rows to all keys, and its backward pass.

N tokens, D width, W the power of two above D; rows and columns are token numbers, scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, rows, stride, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr):
    """(rows, W) entries from `base`; what lies beyond N or D is zero. ALL: no row lies beyond."""
    columns = tl.arange(0, W)
    where = base + rows[:, None] * stride + columns[None, :]
    if ALL and W == D:
        tile = tl.load(where)
    elif ALL:
        tile = tl.load(where, mask=(columns < D)[None, :], other=0.0)
    elif W == D:
        tile = tl.load(where, mask=(rows < N)[:, None], other=0.0)
    else:
        tile = tl.load(where, mask=(rows < N)[:, None] & (columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def store_rows(base, rows, stride, tile, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """The opposite of `load_rows`, in the type of `base`."""
    columns = tl.arange(0, W)
    where = base + rows[:, None] * stride + columns[None, :]
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    tl.store(where, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_bias(bias, rows, columns, stride, N: tl.constexpr):
    """(rows, columns) additive bias in base 2."""
    inside = (rows < N)[:, None] & (columns < N)[None, :]
    return 1.4426950408889634 * tl.load(bias + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_bias_back(bias, rows, columns, stride, N: tl.constexpr):
    """(rows, columns) tile of the transposed bias in base 2."""
    inside = (rows < N)[:, None] & (columns < N)[None, :]
    return 1.4426950408889634 * tl.load(bias + columns[None, :] * stride + rows[:, None], mask=inside, other=0.0)


@triton.jit
def fold(
    top, total, out, query, key, value, rows, columns, bias, bias_stride, scale,
    N: tl.constexpr, BIAS: tl.constexpr, ALL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running softmax: (greatest score, sum of weights, weighted values)."""
    raw = tl.dot(query, tl.trans(key), input_precision=EXACT)
    if BIAS:
        raw = raw * scale + load_bias(bias, rows, columns, bias_stride, N).to(tl.float32)
    if not ALL:
        raw = tl.where((columns < N)[None, :], raw, float("-inf"))
    if BIAS:
        peak = tl.maximum(top, tl.max(raw, 1))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(raw - anchor[:, None])
    else:
        peak = tl.maximum(top, tl.max(raw, 1) * scale)
        anchor = peak
        weights = tl.exp2(raw * scale - anchor[:, None])
    fade = tl.exp2(top - anchor)
    total = total * fade + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * fade[:, None], input_precision=EXACT)
    return peak, total, out


@triton.jit
def attend(
    query, rows, keys, key_stride, values, value_stride, bias, bias_stride, scale,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """softmax(query keysᵀ) values for some rows, and the logarithm (base 2) of the sum. TAIL ≥ N mod KEYS."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, W), tl.float32)
    for start in range(0, N // KEYS * KEYS, KEYS):
        columns = start + tl.arange(0, KEYS)
        key = load_rows(keys, columns, key_stride, N, D, W, True)
        value = load_rows(values, columns, value_stride, N, D, W, True)
        top, total, out = fold(
            top, total, out, query, key, value, rows, columns, bias, bias_stride, scale, N, BIAS, True, EXACT
        )  # fmt: skip
    if TAIL > 0:
        columns = N // KEYS * KEYS + tl.arange(0, TAIL)
        key = load_rows(keys, columns, key_stride, N, D, W, False)
        value = load_rows(values, columns, value_stride, N, D, W, False)
        top, total, out = fold(
            top, total, out, query, key, value, rows, columns, bias, bias_stride, scale, N, BIAS, False, EXACT
        )  # fmt: skip
    return out * (1.0 / total)[:, None], top + tl.log2(total)
