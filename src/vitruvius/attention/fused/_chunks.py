# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, it does not unpack them)
"""Triton building blocks for heads that fit on the chip: the tokens in CHUNKS chunks of KEYS and one of TAIL.

A chunk stays in shared memory while the rows pass by.      N tokens, D width, W the power of two above D
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitruvius.attention.fused._tiles import load_bias, load_rows


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
    return out * (1.0 / total)[:, None], top + tl.log2(total)


@triton.jit
def attend_anchored(
    query, keys, values, anchor, scale,
    N: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`attend_chunks` with weights relative to an anchor known before: no greatest score is sought."""
    total = tl.zeros((query.shape[0],), tl.float32)
    out = tl.zeros((query.shape[0], query.shape[1]), tl.float32)
    for i in tl.static_range(CHUNKS + (TAIL > 0)):
        raw = tl.dot(query, tl.trans(keys[i]), input_precision=EXACT)
        weights = tl.exp2(raw * scale - anchor[:, None])
        if i == CHUNKS:
            columns = CHUNKS * KEYS + tl.arange(0, TAIL)
            weights = tl.where((columns < N)[None, :], weights, 0.0)
        total += tl.sum(weights, 1)
        out = tl.dot(weights.to(query.dtype), values[i], out, input_precision=EXACT)
    return out * (1.0 / total)[:, None], anchor + tl.log2(total)
