"""The cycle model of the ViTCoD accelerator: how long a polarised mask takes on that chip. No numerics, no measurement.

You et al. 2023, "ViTCoD", arXiv:2210.09573, section V, and its released simulator. 500 MHz, 64 × 8 processing elements,
76.8 GiB/s, 8-bit data; softmax is free there. N tokens, H heads, G global tokens, nnz kept pairs outside their columns,
P width of the array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitruvius._errors import ConfigError
from vitruvius.compression.polarisation import Polarised

HeadChoice = Literal["all", "first"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The chip as published."""

    width: int = 64  # P, columns of processing elements
    height: int = 8
    frequency: float = 500e6  # Hz
    bandwidth: float = 76.8 * 2**30  # bytes per second

    def load(self, size: float, share: float = 1.0) -> int:
        """Cycles to move `size` bytes over a share of the bandwidth."""
        return math.ceil(size / (self.bandwidth * share) * self.frequency)

    def seconds(self, cycles: float) -> float:
        """How long this many `cycles` take at the chip's frequency."""
        return cycles / self.frequency


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Where cycles go; loading and computing overlap, so the longer one counts."""

    load: int
    decode: int
    scores: int  # q kᵀ, sampled
    values: int  # map times v, sparse

    @property
    def compute(self) -> int:
        return self.scores + self.values

    @property
    def total(self) -> int:
        return max(self.load, self.decode + self.compute)

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            load=self.load + other.load,
            decode=self.decode + other.decode,
            scores=self.scores + other.scores,
            values=self.values + other.values,
        )


def attention_cycles(
    layers: Sequence[Polarised],
    *,
    head_dim: int,
    ratio: float = 1.0,
    heads: HeadChoice = "all",
    chip: Accelerator | None = None,
) -> Cycles:
    """Cycles of the attention of all layers; `ratio` is the rank of the auto-encoder over the number of heads.

    Heads run side by side. With `heads="first"` head 0 stands for all, as in the released simulator; with "all" a
    layer takes as long as its slowest head.

    `layers` are the polarised masks, `head_dim` is the width of a head, `chip` by default the published one.
    """
    if not layers:
        raise ConfigError("attention_cycles got no layers.")
    if not 0 < ratio <= 1:
        raise ConfigError(f"ratio = {ratio}, expected the share of heads kept, above 0 and at most 1.")
    cycles = Cycles(load=0, decode=0, scores=0, values=0)
    for layer in layers:
        cycles += _layer(layer, head_dim, ratio, heads, chip or Accelerator())
    return cycles


def dense_layers(layers: Sequence[Polarised]) -> list[Polarised]:
    """The same `layers` with nothing removed: every token is global. The baseline."""
    return [
        Polarised(
            keep=layer.keep.new_ones(layer.keep.shape),
            order=layer.order,
            num_global=layer.num_global.new_full(layer.num_global.shape, layer.keep.shape[-1]),
        )
        for layer in layers
    ]


def _layer(layer: Polarised, head_dim: int, ratio: float, heads: HeadChoice, chip: Accelerator) -> Cycles:
    H, N, _ = layer.keep.shape
    outside = (layer.kept - layer.dense_kept).tolist()
    pairs = list(zip(layer.num_global.tolist(), outside, strict=True))  # (G, nnz) of each head
    if heads == "first":
        chosen = pairs[:1]
    else:
        chosen = pairs
    token = H * ratio * head_dim  # bytes of q or k of one token behind the auto-encoder
    # q is fetched again for each key
    reread = 1.0
    if not any(g for g, _ in chosen):
        reread = max(nnz for _, nnz in chosen) / N
    weights = any(g for g, _ in chosen) + any(g < N for g, _ in chosen) + 1  # of the decoders of k (twice) and q
    load = N * chip.load(token) + round(N * chip.load(token) * reread) + N * chip.load(H * head_dim)
    load += weights * chip.load(H * ratio, 1 / H)
    decode = math.ceil(token / int(chip.width * chip.width / H)) * (N + round(N * reread))
    times = [_head(g, nnz, N, H, head_dim, chip) for g, nnz in chosen]
    return Cycles(load=load, decode=decode, scores=max(t[0] for t in times), values=max(t[1] for t in times))


def _head(G: int, nnz: int, N: int, H: int, head_dim: int, chip: Accelerator) -> tuple[int, int]:
    """Cycles of q kᵀ and of map · v in one head, its two parts side by side on their shares of the array."""
    P = chip.width
    dense = 0
    if G:
        dense = max(int(P * G * N / (nnz + G * N)), 1)
    if nnz:
        dense = min(dense, P - 1)
    sparse = P - dense
    tile = math.ceil(head_dim / (P / H))
    dense_scores = dense_values = sparse_scores = sparse_values = 0
    if G:
        dense_scores = G * math.ceil(N / dense) * tile
        dense_values = math.ceil(N * head_dim * G / max(int(dense * P / H), 1))
    if nnz:
        sparse_scores = math.ceil(nnz / sparse) * tile
        sparse_values = math.ceil(nnz * head_dim / max(int(sparse * P / H), 1))
    return max(dense_scores, sparse_scores), max(dense_values, sparse_values)


@dataclass(frozen=True, kw_only=True)
class LinearCycles:
    """Cycles of the projections and of the MLPs of all layers."""

    load: int
    encode: int
    projections: int
    mlp_load: int
    mlp: int

    @property
    def total(self) -> int:
        return max(self.load, self.encode + self.projections) + max(self.mlp_load, self.mlp)


def linear_cycles(
    *,
    layers: int,
    tokens: int,
    dim: int,
    num_heads: int,
    ratio: float = 1.0,
    mlp_ratio: int = 4,
    rounding: Literal["up", "released"] = "up",
    chip: Accelerator | None = None,
) -> LinearCycles:
    """Cycles of everything but attention. `released` rounds down as its simulator does, so that small jobs are free.

    layers: number of blocks.
    tokens: N, class token included.
    dim: width of the model.
    num_heads: of each block.
    ratio: rank of the auto-encoder over the number of heads; 1 is none.
    mlp_ratio: width of the MLP over that of the model.
    rounding: up, or as released.
    chip: by default the published one.
    """
    chip = chip or Accelerator()

    def over(a: int, b: int) -> int:
        if rounding == "released":
            return a // b
        return -(-a // b)

    N, E, H, head_dim = tokens, dim, num_heads, dim // num_heads
    array, lane = chip.width * chip.height, int(chip.width * chip.height / num_heads)
    behind = 1 / (H * ratio)  # share of the bandwidth of one head behind the encoder
    load = 3 * head_dim * chip.load(H * E) + 2 * chip.load(H, behind)
    load += 2 * N * chip.load(head_dim, behind) + N * chip.load(head_dim, 1 / H)
    load += over(N, lane) * E * chip.load(head_dim, 1 / H)
    mlp_loads = over(N, array) * (mlp_ratio * E * chip.load(E) + E * chip.load(mlp_ratio * E))
    return LinearCycles(
        load=layers * load,
        encode=layers * 2 * N * over(H * head_dim, int(array / (H * ratio))),
        projections=layers * (3 * N * over(E * head_dim, lane) + over(N * E * head_dim, lane)),
        mlp_load=layers * mlp_loads,
        mlp=layers * 2 * over(N * mlp_ratio * E * E, array),
    )
