"""Average attention maps: a row for each site, a picture for each head; queries run down, keys across.

H heads, N queries, M keys
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from vitruvius.report.blocks import Block, Maps, Note, grey_png, section
from vitruvius.report.run import Run, explain_maps
from vitruvius.report.style import figure_style, heat
from vitruvius.report.words import percent

MAX_CELLS = 120_000  # of all maps of a run together; larger maps are averaged down to stay a page


@section("maps", title="Attention maps", order=50)
def maps(runs: Sequence[Run]) -> Sequence[Block]:
    """The average attention map of every head of every site."""
    shown = [run for run in runs if run.maps]
    if not shown:
        return []
    text = (
        "Each picture is one head, from left to right: queries run down, keys across, class and register tokens first. "
        "Colour is the square root of the average attention, each picture up to its own maximum, "
        "or to four times even attention where it stays below that: even maps look even, not full."
    )
    text = " ".join(filter(None, [text, explain_maps(shown)]))
    return [Note(text=text), *(block for run in shown for block in _map_grid(run))]


def _map_grid(run: Run) -> list[Block]:
    small, side = shrink(run.maps, MAX_CELLS)
    sites = []
    for name, heads in small.items():
        keys = run.maps[name].shape[-1]
        sites.append((name, [(grey_png(shade(head, keys)), percent(highest(head, keys))) for head in heads]))
    rows = [
        {"run": run.name, "site": site, "head": head, "query": query}
        | {f"key_{key}": f"{value:.3g}" for key, value in enumerate(row)}
        for site, heads in small.items()
        for head, values in enumerate(heads)
        for query, row in enumerate(values)
    ]
    grid = Maps(
        name=f"maps-{run.index}",
        title=run.name,
        colour=run.look.name,
        sites=sites,
        rows=rows,
        low="0",
        high="the share of attention written below each map, by its square root.",
    )
    if side is None:
        return [grid]
    return [grid, Note(text=f"{run.name}: neighbouring tokens are averaged into at most {side} × {side} bins.")]


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
