"""What attention costs at every site: parameters, multiplications, bytes moved, and the time it really takes.

Multiply-accumulates of the whole are PyTorch's count (torch.utils.flop_counter); those of a mask are counted from its
pattern. H heads, N queries, M keys, D key width, E value width
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.mask import Mask
from vitruvius.attention.sparse_softmax import SparseSoftmax
from vitruvius.heads import Site
from vitruvius.models import PixelModel
from vitruvius.surgery import inner, record, survey


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

    @property
    def saved_macs(self) -> int:
        """What masks save in attention, if nothing removed is computed."""
        return sum(site.dense_macs - site.kept_macs for site in self.sites)

    def __str__(self) -> str:
        width = max(len("whole model"), *(len(site.name) for site in self.sites))
        head = f"{'site':<{width}}  parameters       MACs  attention: all       kept   bytes moved   (dense)    time"
        lines = [head, "-" * len(head)]
        for s in self.sites:
            pairs = f"{_short(s.dense_macs):>14}  {_short(s.kept_macs):>9}"
            moved = f"{_short(s.bytes_moved):>12}  {_short(s.dense_bytes_moved):>8}"
            lines.append(
                f"{s.name:<{width}}  {s.parameters:>10,}  {_short(s.macs):>9}  {pairs}  {moved}  {_ms(s.seconds)}"
            )
        whole = f"{'whole model':<{width}}  {self.parameters:>10,}  {_short(self.macs):>9}"
        return "\n".join([*lines, f"{whole}{'':>53}  {_ms(self.seconds)}"])


@torch.no_grad()
def account(model: PixelModel, *, measure: int = 0, element_bytes: int = 4) -> Cost:
    """Cost of one image; with `measure` the median time of that many runs, as the machine is now.

    `model` is a PixelModel, rewired or bare; `measure` 0 (the default) measures no time; `element_bytes` is the size of
    a number, 4 for float32.
    """
    root, sites = inner(model), survey(model)
    x = next(root.parameters()).new_zeros(1, *model.data_config["input_size"])
    windows: dict[str, int] = {}
    counter = FlopCounterMode(display=False)
    watch = record(root, on_heads=lambda name, heads: windows.update({name: len(heads.q)}))
    with watch, counter, sdpa_kernel(SDPBackend.MATH):
        root(x)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    if measure:
        times, whole = _measured(root, list(sites), x, measure)
    else:
        times, whole = ({}, None)
    rows = [
        _site_cost(root, site, windows[name], flops, element_bytes, times.get(name)) for name, site in sites.items()
    ]
    parameters = sum(p.numel() for p in root.parameters())
    return Cost(parameters=parameters, macs=flops["Global"] // 2, sites=rows, seconds=whole)


def _site_cost(
    root: nn.Module, site: Site, windows: int, flops: dict[str, int], size: int, seconds: float | None
) -> SiteCost:
    module: Any = root.get_submodule(site.name)
    if hasattr(module, "core"):
        parts = dict(module.core.parts)
    else:
        parts = {}
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
    begun: dict[str, float] = {}
    spent: dict[str, list[float]] = {name: [] for name in names}
    whole: list[float] = []
    handles = []
    for name in names:
        module = root.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, n=name: begun.update({n: time.perf_counter()})))
        handles.append(module.register_forward_hook(_stop(name, begun, spent)))
    try:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            root(x)
            whole.append(time.perf_counter() - start)
    finally:
        for handle in handles:
            handle.remove()
    return {name: statistics.median(spent[name][1:]) for name in names}, statistics.median(whole[1:])


def _stop(name: str, begun: dict[str, float], spent: dict[str, list[float]]) -> Callable[..., None]:
    return lambda *_: spent[name].append(time.perf_counter() - begun[name])


def _short(number: float) -> str:
    """1234567 → 1.23 M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:6.2f} ms"
