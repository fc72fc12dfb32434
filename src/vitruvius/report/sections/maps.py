"""Average attention maps: a row for each site, a picture for each head; queries run down, keys across.

H heads, N queries, M keys
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from vitruvius.report._blocks import Block, Note
from vitruvius.report._markup import Rows, csv_link, grey_png
from vitruvius.report._names import say_maps
from vitruvius.report._numbers import percent
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.style import figure_style, heat

MAX_CELLS = 120_000  # of all maps of a run together; larger maps are averaged down to stay a page


@dataclass(frozen=True, kw_only=True)
class MapGrid(Block):
    """The maps of one run with their data as CSV."""

    template: ClassVar[str] = "maps"
    name: str
    title: str
    colour: str
    sites: Sequence[tuple[str, Sequence[tuple[str, str]]]]  # (site, (picture, what is written below it) by head)
    rows: Rows
    low: str = "0"  # what stands before the scale of colours, and behind it
    high: str = "the share of attention written below each map, by its square root."

    @property
    def narrow(self) -> bool:
        """Whether two grids have room side by side."""
        return max(len(heads) for _, heads in self.sites) <= 4

    @property
    def csv(self) -> str:
        return csv_link(self.rows)


@section("maps", title="Attention maps", order=50)
def maps(runs: Sequence[Run]) -> Sequence[Block]:
    """The average attention map of every head of every site. `runs` are those of the page."""
    shown = [run for run in runs if run.maps]
    if not shown:
        return []
    text = (
        "Each picture is one head, from left to right: queries run down, keys across, class and register tokens first. "
        "Colour is the square root of the average attention, each picture up to its own maximum, "
        "or to four times even attention where it stays below that: even maps look even, not full."
    )
    text = " ".join(filter(None, [text, say_maps(shown)]))
    return [Note(text=text), *(block for run in shown for block in _grid(run))]


def draw_maps(maps: dict[str, np.ndarray]) -> Figure:
    """The same grid as a figure to save: sites down, heads across.

    `maps` are (H, N, M), by site.
    """
    return draw_grid({name: [shade(values, values.shape[-1]) for values in heads] for name, heads in maps.items()})


def draw_grid(pictures: Mapping[str, Sequence[np.ndarray]], label: Callable[[np.ndarray], str] | None = None) -> Figure:
    """Pictures of values in [0, 1], one row per site, one column per head; each with a `label` below it.

    `pictures` are (rows, columns) each, by site; `label` makes a text of one (default: none).
    """
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
    """Average maps down until all cells fit; also the largest side then, or None where nothing was done.

    `maps` are (H, N, M), by site; `max_cells` is how many numbers they may have together.
    """
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


def _grid(run: Run) -> list[Block]:
    small, side = shrink(run.maps, MAX_CELLS)
    sites = []
    for name, heads in small.items():
        keys = run.maps[name].shape[-1]
        sites.append((name, [(grey_png(shade(head, keys)), percent(highest(head, keys))) for head in heads]))
    name = f"maps-{run.index}"
    grid = MapGrid(name=name, title=run.name, colour=run.look.name, sites=sites, rows=_rows(run, small))
    if side is None:
        return [grid]
    return [grid, Note(text=f"{run.name}: neighbouring tokens are averaged into at most {side} × {side} bins.")]


def highest(values: np.ndarray, num_keys: int) -> float:
    """The attention at the end of a map's scale: its maximum, but at least 4 / M.

    `values` are attention a; `num_keys` is M before maps were shrunk.
    """
    return max(float(values.max()), 4 / num_keys)


def shade(values: np.ndarray, num_keys: int) -> np.ndarray:
    """√(a / top), top being the maximum but at least 4 / M: even attention, 1 / M, is at most half.

    `values` are attention a; `num_keys` is M before maps were shrunk.
    """
    return np.sqrt(np.clip(values / highest(values, num_keys), 0, 1))


def _rows(run: Run, maps: dict[str, np.ndarray]) -> list[dict[str, object]]:
    """Wide: one row per query, one column per key."""
    return [
        {"run": run.name, "site": site, "head": head, "query": query}
        | {f"key_{key}": f"{value:.3g}" for key, value in enumerate(row)}
        for site, heads in maps.items()
        for head, values in enumerate(heads)
        for query, row in enumerate(values)
    ]
