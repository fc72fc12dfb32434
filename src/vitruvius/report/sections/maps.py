"""Average attention maps and masks: a row for each site, a picture for each head; queries run down, keys across.

H heads, N queries, M keys; True in a mask = kept
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import read_text
from vitruvius._format import natural_key, percent
from vitruvius._style import figure_style, heat, legend_below, new_axes, series
from vitruvius.compression.masks import Masks, guess_sites
from vitruvius.report.blocks import Block, Maps, Note, grey_png, section
from vitruvius.report.run import Run, explain_maps

MAX_CELLS = 120_000  # of all maps of a run together; larger maps are averaged down to stay a page
KEYS = (".core.mask.keep", ".core.sparse_softmax.keep")


@section("maps", title="Attention maps", order=50)
def maps(runs: Sequence[Run]) -> Sequence[Block]:
    """The average attention map of every head of every site."""
    shown = [run for run in runs if run.maps]
    if not shown:
        return []
    text = (
        "Each picture is one head, from left to right: queries run down, keys across, class and register tokens first. "
        "Colour is the square root of the average attention, each picture up to its own maximum, "
        "or to four times even attention where it stays below that: even maps look even, not full. "
        f"{explain_maps(shown)}"
    ).strip()
    return [Note(text=text), *(block for run in shown for block in _map_grid(run))]


def _map_grid(run: Run) -> list[Block]:
    small, side = shrink(run.maps, MAX_CELLS)
    keys = {name: heads.shape[-1] for name, heads in run.maps.items()}  # before they were shrunk
    sites = [
        (name, [(grey_png(shade(head, keys[name])), percent(highest(head, keys[name]))) for head in heads])
        for name, heads in small.items()
    ]
    rows = [
        {"run": run.name, "site": site, "head": head, "query": query}
        | {f"key_{key}": f"{value:.3g}" for key, value in enumerate(row)}
        for site, heads in small.items()
        for head, values in enumerate(heads)
        for query, row in enumerate(values)
    ]
    high = "the share of attention written below each map, by its square root."
    note = Note(text=f"{run.name}: {_binned(side)}")
    return [_grid(run, "maps", sites, rows, "0", high), *([note] if side else [])]


def _grid(run: Run, kind: str, sites: Any, rows: Any, low: str, high: str) -> Maps:
    name, look = f"{kind}-{run.index}", run.look.name
    return Maps(name=name, title=run.name, colour=look, sites=sites, rows=rows, low=low, high=high)


def _binned(side: int | None) -> str:
    return f"neighbouring tokens are averaged into at most {side} × {side} bins." if side else ""


def draw_maps(maps: dict[str, np.ndarray]) -> Figure:
    """The same grid as a figure to save: sites down, heads across. `maps` are (H, N, M), by site."""
    return draw_grid({name: [shade(values, values.shape[-1]) for values in heads] for name, heads in maps.items()})


def draw_grid(pictures: Mapping[str, Sequence[np.ndarray]], label: Callable[[np.ndarray], str] | None = None) -> Figure:
    """Pictures (rows, columns) of values in [0, 1], one row per site, one column per head, a `label` below each."""
    columns = max(len(heads) for heads in pictures.values())
    with figure_style():
        figure = Figure(figsize=(1.1 * columns + 1, 1.15 * len(pictures)), layout="constrained")
        for row, (name, heads) in enumerate(pictures.items()):
            for head, values in enumerate(heads):
                axes = figure.add_subplot(len(pictures), columns, row * columns + head + 1)
                axes.imshow(values, cmap=heat(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
                if label is not None:
                    axes.set_xlabel(label(values), fontsize=7)
                if head == 0:
                    axes.set_ylabel(name, rotation=0, ha="right", va="center")
                if row == 0:
                    axes.set_title(f"head {head}", loc="center", fontweight="normal", fontsize=9, pad=4)
    return figure


def shrink(maps: dict[str, np.ndarray], max_cells: int) -> tuple[dict[str, np.ndarray], int | None]:
    """Average maps (H, N, M) down until all cells fit; also the largest side then, or None where nothing was done."""
    if sum(site.size for site in maps.values()) <= max_cells:
        return maps, None
    side = max(8, int((max_cells / sum(len(site) for site in maps.values())) ** 0.5))
    return {name: np.stack([_pool(head, side) for head in site]) for name, site in maps.items()}, side


def _pool(values: np.ndarray, side: int) -> np.ndarray:
    """(N, M) averaged into at most side × side bins of neighbouring tokens."""
    for axis in (0, 1):
        edges = np.linspace(0, values.shape[axis], min(side, values.shape[axis]) + 1).round().astype(int)
        sums = np.add.reduceat(values, edges[:-1], axis=axis)
        widths = np.diff(edges)
        values = sums / (widths[:, None] if axis == 0 else widths)
    return values


def highest(values: np.ndarray, num_keys: int) -> float:
    """The attention at the end of a map's scale: its maximum, but at least 4 / M, of the M before maps were shrunk."""
    return max(float(values.max()), 4 / num_keys)


def shade(values: np.ndarray, num_keys: int) -> np.ndarray:
    """√(a / highest): even attention, 1 / M, is at most half."""
    return np.sqrt(np.clip(values / highest(values, num_keys), 0, 1))


@section("masks", title="Attention masks", order=52)
def masks(runs: Sequence[Run]) -> Sequence[Block]:
    """The pairs of query and key that a run's mask keeps, and how much it removes."""
    blocks = [block for run in runs for block in _mask_grid(run)]
    if not blocks:
        return []
    text = "Each picture is one head, queries down, keys across; what the mask keeps is dark."
    return [Note(text=text), *blocks, *(Note(text=line) for run in runs for line in cycle_lines(run))]


def _mask_grid(run: Run) -> list[Block]:
    if (masks := read_masks(run)) is None:
        return []
    small, side = shrink({name: keep.float().numpy() for name, keep in masks.keep.items()}, MAX_CELLS)
    kept = {name: [f"{keep.float().mean():.0%} kept" for keep in heads] for name, heads in masks.keep.items()}
    sites = [(name, list(zip(map(grey_png, heads), kept[name], strict=True))) for name, heads in small.items()]
    rows = [
        {"run": run.name, "site": site, "head": head, "kept": share.kept, "pairs": share.pairs}
        | {"sparsity": f"{share.sparsity:.6f}", "sparsity_unprotected": f"{share.sparsity_inside:.6f}"}
        for site, shares in masks.sparsity.heads.items()
        for head, share in enumerate(shares)
    ]
    total = masks.sparsity.total
    removed = f"{total.sparsity:.2%} of all pairs removed, {total.sparsity_inside:.2%} without protected tokens"
    note = Note(text="; ".join(filter(None, [f"{run.name}: {removed}", _binned(side)])))
    return [_grid(run, "masks", sites, rows, "removed", "kept."), note]


def read_masks(run: Run) -> Masks | None:
    """The masks in the checkpoint of a run: what the model really does; none of a damaged one, remarked elsewhere."""
    files = [run.folder / name for name in ("best.safetensors", "last.safetensors")]
    path = next(filter(Path.is_file, files), None)
    keep: dict[str, Tensor] = {}
    with contextlib.suppress(SafetensorError, OSError):
        if path is not None:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.endswith(KEYS)]  # noqa: SIM118 (not a dict)
                keep = {name.partition(".core.")[0]: file.get_tensor(name) for name in sorted(names, key=natural_key)}
    if not keep:
        return None
    sites = guess_sites(keep)
    protected = {name: tuple(range(site.num_prefix_tokens)) for name, site in sites.items()}
    return Masks(keep=keep, sites=sites, protected=protected)


def cycle_lines(run: Run) -> list[str]:
    """What `vitruvius cycles` left in a run, as one sentence; nothing where it has not been asked."""
    try:
        rows = json.loads(read_text(run.folder / "cycles.json"))["rows"]
        before, cycles = int(rows[0]["total"]), int(rows[-1]["total"])
    except (RunError, ValueError, KeyError, IndexError, TypeError):
        return []
    return [
        f"{run.name}: {cycles:,} cycles of attention on ViTCoD's accelerator, {before:,} without masks "
        f"({before / max(cycles, 1):.2f}× faster; a model of that chip, no measurement)."
    ]


def draw_masks(keep: Mapping[str, Tensor]) -> Figure:
    """The same grid as a figure to save: sites down, heads across. `keep` are masks (H, N, M) by site, True = kept."""
    patterns = {name: [pattern.float().numpy() for pattern in heads] for name, heads in keep.items()}
    return draw_grid(patterns, label=lambda pattern: f"{1 - pattern.mean():.0%} removed")


def draw_accuracy(curves: Mapping[str, Mapping[float, float]], *, dense: float) -> Figure:
    """Accuracy against the share of pairs removed, one line per way (by its name); the dense accuracy beside them."""
    shares = {name: {s: 100 * a for s, a in points.items()} for name, points in curves.items()}
    return _draw_against_sparsity(shares, dense=100 * dense, ylabel="accuracy, %", title="Accuracy against sparsity")


def draw_cycles(points: Mapping[str, Mapping[float, float]]) -> Figure:
    """Cycles of the accelerator against the share of pairs removed, one line per part (by its name)."""
    return _draw_against_sparsity(points, ylabel="cycles", title="Cycles against sparsity", yscale="log")


def _draw_against_sparsity(
    lines: Mapping[str, Mapping[float, float]], *, dense: float | None = None, **labels: str
) -> Figure:
    with figure_style():
        figure, axes = new_axes()
        if dense is not None:
            axes.axhline(dense, color="0.5", linewidth=1, linestyle=(0, (4, 3)), label="dense")
        for index, (name, points) in enumerate(lines.items()):
            look, shares = series(index), [100 * share for share in points]
            axes.plot(shares, list(points.values()), color=look.colour, marker=look.marker, label=name)
        axes.set(xlabel="pairs removed, %", **labels)
        legend_below(figure)
    return figure
