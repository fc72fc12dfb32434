"""What attention costs: on this machine site by site, and in cycles of the ViTCoD accelerator.

Multiply-accumulates of the whole are PyTorch's count (torch.utils.flop_counter); those of a mask are counted from its
pattern. The cycle model is that of You et al. 2023, "ViTCoD", arXiv:2210.09573, section V, and of its released
simulator: 500 MHz, 64 × 8 processing elements, 76.8 GiB/s, 8-bit data; softmax is free there. No numerics, no
measurement. H heads, N queries or tokens, M keys, D key width, E value width, G global tokens, P width of the array
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitruvius._errors import ConfigError
from vitruvius._format import format_table
from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.mask import Mask
from vitruvius.attention.sparse_softmax import SparseSoftmax
from vitruvius.compression.masks import count
from vitruvius.compression.polarisation import Polarised, polarise_all
from vitruvius.heads import Site
from vitruvius.models import PixelModel
from vitruvius.surgery import record, survey
from vitruvius.surgery.base import inner

HeadChoice = Literal["all", "first"]


@dataclass(frozen=True, kw_only=True)
class SiteCost:
    """One site, for one image."""

    name: str
    core: str
    parameters: int
    macs: int  # of the module as it runs, projections included
    dense_macs: int  # of q kᵀ and map · v over all pairs
    kept_macs: int  # over the pairs that the mask keeps
    bytes_moved: int  # weights, q, k, v, output and the kept part of the map, each once
    dense_bytes_moved: int  # the same without mask and auto-encoder
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A model, for one image."""

    parameters: int
    macs: int
    sites: list[SiteCost]
    seconds: float | None = None

    def __str__(self) -> str:
        heads = ("site", "parameters", "MACs", "attention: all", "kept", "bytes moved", "(dense)", "time")
        rows = []
        for s in self.sites:
            counts = (s.macs, s.dense_macs, s.kept_macs, s.bytes_moved, s.dense_bytes_moved)
            rows.append((s.name, f"{s.parameters:,}", *map(_short, counts), _ms(s.seconds)))
        whole = ("whole model", f"{self.parameters:,}", _short(self.macs), "", "", "", "", _ms(self.seconds))
        return "\n".join(format_table(heads, [*rows, whole]))


@torch.no_grad()
def account(model: PixelModel, *, measure: int = 0, element_bytes: int = 4) -> Cost:
    """Cost of one image; with `measure` the median time of that many runs, as the machine is now.

    element_bytes: the size of a number.
    """
    root, sites = inner(model), survey(model)
    x = next(root.parameters()).new_zeros(1, *model.data_config["input_size"])
    windows: dict[str, int] = {}
    counter = FlopCounterMode(display=False)
    watch = record(root, on_heads=lambda name, heads: windows.update({name: len(heads.q)}))
    with watch, counter, sdpa_kernel(SDPBackend.MATH):
        root(x)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    times, whole = _measured(root, list(sites), x, measure) if measure else ({}, None)
    rows = [
        _site_cost(root, site, windows[name], flops, element_bytes, times.get(name)) for name, site in sites.items()
    ]
    parameters = sum(p.numel() for p in root.parameters())
    return Cost(parameters=parameters, macs=flops["Global"] // 2, sites=rows, seconds=whole)


def _site_cost(
    root: nn.Module, site: Site, windows: int, flops: dict[str, int], size: int, seconds: float | None
) -> SiteCost:
    module: Any = root.get_submodule(site.name)
    parts = dict(module.core.parts) if hasattr(module, "core") else {}
    pairs = site.num_heads * site.num_queries * site.num_keys
    kept = next((int(p.keep.sum()) for p in parts.values() if isinstance(p, Mask | SparseSoftmax)), pairs)
    width = site.key_dim + site.value_dim
    parameters = sum(p.numel() for p in module.parameters())
    values = windows * site.num_heads * site.value_dim * (site.num_keys + site.num_queries)
    q, k = (windows * site.num_heads * n * site.key_dim for n in (site.num_queries, site.num_keys))
    moved = round(q * _squeezed(parts, "q", site) + k * _squeezed(parts, "k", site))
    return SiteCost(
        name=site.name,
        core=" → ".join(parts) or "upstream",
        parameters=parameters,
        macs=flops.get(f"{type(root).__name__}.{site.name}", 0) // 2,
        dense_macs=windows * pairs * width,
        kept_macs=windows * kept * width,
        bytes_moved=size * (parameters + values + moved + windows * kept),
        dense_bytes_moved=size * (parameters + values + q + k + windows * pairs),
        seconds=seconds,
    )


def _squeezed(parts: dict[str, nn.Module], tensor: str, site: Site) -> float:
    """Share of q or k that passes the bottleneck of an auto-encoder."""
    for part in parts.values():
        if isinstance(part, LowRank) and tensor in part.tensors:
            return part._layers(tensor)[0].out_features / site.num_heads
    return 1.0


def _measured(root: nn.Module, names: list[str], x: Tensor, repeats: int) -> tuple[dict[str, float], float]:
    """Median seconds at every site and of the whole, after one run to warm up."""
    started: dict[nn.Module, float] = {}
    spent: dict[nn.Module, list[float]] = {root.get_submodule(name): [] for name in names}
    whole: list[float] = []

    def start(module: nn.Module, _: Any) -> None:
        started[module] = time.perf_counter()

    def stop(module: nn.Module, *_: Any) -> None:
        spent[module].append(time.perf_counter() - started[module])

    with ExitStack() as hooks:
        for module in spent:
            hooks.enter_context(module.register_forward_pre_hook(start))
            hooks.enter_context(module.register_forward_hook(stop))
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            root(x)
            whole.append(time.perf_counter() - begin)
    medians = [statistics.median(seconds[1:]) for seconds in spent.values()]
    return dict(zip(names, medians, strict=True)), statistics.median(whole[1:])


def _short(number: float) -> str:
    """1234567 → 1.23 M."""
    size, letter = next((pair for pair in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if number >= pair[0]), (1, ""))
    return f"{number / size:.3g}{letter}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:6.2f} ms"


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


PUBLISHED = Accelerator()


class Cycles(NamedTuple):
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


def attention_cycles(
    layers: Sequence[Polarised],
    *,
    head_dim: int,
    ratio: float = 1.0,
    heads: HeadChoice = "all",
    chip: Accelerator = PUBLISHED,
) -> Cycles:
    """Cycles of the attention of all layers; `ratio` is the rank of the auto-encoder over the number of heads.

    Heads run side by side. With `heads="first"` head 0 stands for all, as in the released simulator; with "all" a
    layer takes as long as its slowest head.
    """
    if not layers:
        raise ConfigError("attention_cycles got no layers.")
    if not 0 < ratio <= 1:
        raise ConfigError(f"ratio = {ratio}, expected the share of heads kept, above 0 and at most 1.")
    of_layers = [_layer(layer, head_dim, ratio, heads, chip) for layer in layers]
    return Cycles(*map(sum, zip(*of_layers, strict=True)))


def dense_layers(layers: Sequence[Polarised]) -> list[Polarised]:
    """The same with nothing removed: every token is global. The baseline."""
    return [
        replace(
            layer,
            keep=torch.ones_like(layer.keep),
            num_global=torch.full_like(layer.num_global, layer.keep.shape[-1]),
        )
        for layer in layers
    ]


def _layer(layer: Polarised, head_dim: int, ratio: float, heads: HeadChoice, chip: Accelerator) -> Cycles:
    H, N, _ = layer.keep.shape
    outside = (layer.kept - layer.dense_kept).tolist()
    pairs = list(zip(layer.num_global.tolist(), outside, strict=True))  # (G, nnz) of each head
    chosen = pairs[:1] if heads == "first" else pairs
    token = H * ratio * head_dim  # bytes of q or k of one token behind the auto-encoder
    reread = 1.0 if any(g for g, _ in chosen) else max(nnz for _, nnz in chosen) / N  # q, again for each key
    weights = any(g for g, _ in chosen) + any(g < N for g, _ in chosen) + 1  # of the decoders of k (twice) and q
    load = N * chip.load(token) + round(N * chip.load(token) * reread) + N * chip.load(H * head_dim)
    load += weights * chip.load(H * ratio, 1 / H)
    decode = math.ceil(token / int(chip.width * chip.width / H)) * (N + round(N * reread))
    times = [_head(g, nnz, N, H, head_dim, chip) for g, nnz in chosen]
    return Cycles(load=load, decode=decode, scores=max(t[0] for t in times), values=max(t[1] for t in times))


def _head(G: int, nnz: int, N: int, H: int, head_dim: int, chip: Accelerator) -> tuple[int, int]:
    """Cycles of q kᵀ and of map · v in one head, its two parts side by side on their shares of the array."""
    P = chip.width
    dense = max(int(P * G * N / (nnz + G * N)), 1) if G else 0
    if nnz:
        dense = min(dense, P - 1)
    sparse = P - dense
    tile = math.ceil(head_dim / (P / H))
    scores = max(G * math.ceil(N / max(dense, 1)), math.ceil(nnz / max(sparse, 1))) * tile
    dense_values = math.ceil(N * head_dim * G / max(int(dense * P / H), 1))
    sparse_values = math.ceil(nnz * head_dim / max(int(sparse * P / H), 1))
    return scores, max(dense_values, sparse_values)


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
    chip: Accelerator = PUBLISHED,
) -> LinearCycles:
    """Cycles of everything but attention. `released` rounds down as its simulator does, so that small jobs are free.

    tokens: N, class token included. dim: width of the model. ratio: rank of the auto-encoder over the number of heads;
    1 is none. mlp_ratio: width of the MLP over that of the model. chip: by default the published one.
    """

    def over(a: int, b: int) -> int:
        return a // b if rounding == "released" else -(-a // b)

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


@dataclass(frozen=True)
class CycleTable:
    """Cycles of the attention of a model by the share of pairs removed; 0 is dense."""

    rows: dict[float, Cycles]

    def speed_up(self, sparsity: float) -> float:
        """Dense cycles over those at this `sparsity`, the share of pairs removed."""
        return self.rows[0.0].total / max(self.rows[sparsity].total, 1)

    def curves(self) -> dict[str, dict[float, float]]:
        """What a figure draws: the whole, and what it is made of."""
        kinds = {"total": "total", "moving data": "load", "computing": "compute", "auto-encoder": "decode"}
        return {name: {s: getattr(c, key) for s, c in self.rows.items()} for name, key in kinds.items()}

    def __str__(self) -> str:
        rows = []
        for sparsity, c in self.rows.items():
            numbers = [f"{number:,}" for number in (c.load, c.decode, c.compute, c.total)]
            rows.append([f"{100 * sparsity:.2f} %", *numbers, f"{self.speed_up(sparsity):.2f}×"])
        return "\n".join(format_table(["removed", "load", "decode", "compute", "total", "faster"], rows))


def cycle_table(
    patterns: list[Mapping[str, Tensor]],
    *,
    head_dim: int,
    ratio: float = 1.0,
    threshold: int | None = None,
    heads: HeadChoice = "all",
    chip: Accelerator = PUBLISHED,
) -> CycleTable:
    """Cycles of several masks of one model, each {site: (H, N, N)}, and of no mask.

    ratio: rank of the auto-encoder over the number of heads; 1 is none. threshold: queries that must look at a token to
    make it global; None: a quarter of the tokens. heads: all, or the first one for all as in the released simulator.
    """
    if not patterns:
        raise ConfigError("cycle_table got no masks.")
    layers = {count(keep).total.sparsity: list(polarise_all(keep, threshold=threshold).values()) for keep in patterns}
    layers = {0.0: dense_layers(next(iter(layers.values())))} | layers
    cycles = partial(attention_cycles, head_dim=head_dim, ratio=ratio, heads=heads, chip=chip)
    return CycleTable({sparsity: cycles(layers[sparsity]) for sparsity in sorted(layers)})
