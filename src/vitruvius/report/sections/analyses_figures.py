"""Figures of analyses by layer: bands over heads, histograms over heads, and heat maps of heads, chance beside each.

Layers are the sites of a model in order; nulls are dashed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitruvius.analysis import NULLS, Row, Table
from vitruvius.report.sections.analyses_words import axis_label, heading, words
from vitruvius.report.style import LIGHT, LINES, Series, figure_style, heat, legend_below, new_axes, series

DASHES = dict(zip(NULLS, LINES[1:], strict=False))


@dataclass(frozen=True)
class Scale:
    """Plain, or in powers of ten where positive numbers span more than two of them; up to the limits of float64."""

    powers: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """The scale that suits these `values`."""
        return cls(bool(values) and min(values) > 0 and max(values) / 100 > min(values))

    def __call__(self, values: Sequence[float]) -> list[float]:
        """Where to draw them. `values` are positive on a scale of powers."""
        if self.powers:
            return [math.log10(v) if v > 0 else math.nan for v in values]
        return list(values)

    def label(self, axes: Axes) -> None:
        """Ticks that show the numbers. `axes` are those of the figure."""
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=self.powers))
        if self.powers:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: power_of_ten(power)))


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A table on the page, and how its lines look."""

    name: str
    look: Series
    table: Table


def alone(table: Table) -> list[Shown]:
    """One `table`, as the only one."""
    return [Shown(name=str(table.facts.get("model", "model")), look=series(0), table=table)]


def draw_bands(shown: Sequence[Shown], analysis: str, statistic: str, *, legend: bool = False) -> Figure:
    """The mean over heads for each layer, with the range of heads as a band, and every null that can tell.

    `shown` are runs with their tables; `analysis` and `statistic` say what is drawn; `legend` adds one (default: no).
    """
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        rows = [row for one in shown for row in one.table.select(analysis=analysis, statistic=statistic)]
        scale = Scale.of([row.mean for row in rows])
        for one in shown:
            _draw_layers(axes, one, analysis, statistic, scale, quiet=len(shown) == 1)
        axes.set_title(words(statistic))
        axes.set_xlabel("layer")
        axes.set_ylabel(axis_label(analysis, statistic))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        scale.label(axes)
        if legend:
            stand_alone(figure, axes, f"{heading(analysis)}: {words(statistic)}")
    return figure


def draw_histogram(shown: Sequence[Shown], analysis: str, statistic: str, *, legend: bool = False) -> Figure:
    """Heads of all layers as bars, their nulls as lines; the outermost bins hold all that lies beyond.

    `shown` are runs with their tables; `analysis` and `statistic` say what is drawn; `legend` adds one (default: no).
    """
    tables = [(one, one.table.select(analysis=analysis, statistic=statistic)) for one in shown]
    edges = _histogram_edges([row for _, rows in tables for row in rows])
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        for one, rows in tables:
            null_colour = one.look.colour
            if len(shown) == 1:
                null_colour = LIGHT["ink"]
            _draw_bars(axes, one, rows, edges, label=_label(one, shown), null_colour=null_colour)
        axes.set_title(f"heads by {words(statistic)}")
        axes.set_xlabel(axis_label(analysis, statistic))
        axes.set_ylabel("number of heads")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        if legend:
            stand_alone(figure, axes, f"{heading(analysis)}: heads by {words(statistic)}")
    return figure


def _histogram_edges(rows: Sequence[Row]) -> np.ndarray:
    """24 bins between the 2nd and the 98th percentile of what is observed and of chance."""
    values = []
    for row in rows:
        values.append(row.mean)
        if row.null_mean is not None:
            values.append(row.null_mean)
    low, high = np.percentile(values, [2, 98])
    return np.linspace(low, high + 1e-12, 25)


def _draw_bars(
    axes: Axes, one: Shown, rows: Sequence[Row], edges: np.ndarray, *, label: str | None, null_colour: str
) -> None:
    """One run's heads as bars, each null as a line over the middles of the bins."""
    low = edges[0]
    high = edges[-1] - 1e-12
    means = [row.mean for row in rows if row.null == rows[0].null]
    axes.hist(np.clip(means, low, high), bins=edges.tolist(), color=one.look.colour, alpha=0.45, label=label)
    for null in telling_nulls(rows):
        drawn = [row.null_mean for row in rows if row.null == null and row.null_mean is not None]
        counts, _ = np.histogram(np.clip(drawn, low, high), bins=edges)
        look: dict[str, Any] = {"color": null_colour, "linestyle": DASHES[null], "linewidth": 1.3, "label": null}
        axes.plot((edges[1:] + edges[:-1]) / 2, counts, **look)


def draw_heads(table: Table, analysis: str, statistic: str) -> Figure:
    """Two heat maps of one scale, layers down and heads across: what was observed, and the nearest null.

    `table` holds the `analysis` and its `statistic`.
    """
    rows = table.select(analysis=analysis, statistic=statistic)
    null = _nearest(rows)
    pictures = {words(statistic): _grid(rows, "mean", rows[0].null)}
    if null is not None:
        pictures[f"chance ({null})"] = _grid(rows, "null_mean", null)
    top = max(float(np.nanmax(grid)) for grid in pictures.values())
    low = min(0.0, *(float(np.nanmin(grid)) for grid in pictures.values()))
    with figure_style():
        shape = next(iter(pictures.values())).shape
        figure = Figure(figsize=(1.2 + 2.0 * len(pictures), 0.9 + 0.2 * shape[0]), layout="constrained")
        panels = [figure.add_subplot(1, len(pictures), place + 1) for place in range(len(pictures))]
        for axes, (title, grid) in zip(panels, pictures.items(), strict=True):
            picture = axes.imshow(grid, cmap=heat(), vmin=low, vmax=top, aspect="auto", interpolation="nearest")
            axes.set_title(title)
            axes.set_xlabel("head")
            axes.grid(visible=False)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panels[0].set_ylabel("layer")
        bar = figure.colorbar(picture, ax=panels, shrink=0.9, label=axis_label(analysis, statistic))
        bar.outline.set_visible(False)
    return figure


def stand_alone(figure: Figure, axes: Axes, title: str) -> None:
    """Title and legend for a figure outside the page; the legend keeps clear of the data.

    `figure` with its `axes` is changed; `title` goes above it.
    """
    axes.set_title(title)
    legend_below(figure, columns=4)


def telling_nulls(rows: Sequence[Row]) -> list[str]:
    """The nulls that do not leave the statistic as it is. `rows` are those of one statistic."""
    told = {row.null for row in rows if row.claim != "the same by construction"}
    return [null for null in NULLS if null in told]


def _draw_layers(axes: Axes, one: Shown, analysis: str, statistic: str, scale: Scale, *, quiet: bool) -> None:
    """Mean over heads and band over heads, layer by layer, with its nulls; `quiet` where one run stands alone."""
    rows = one.table.select(analysis=analysis, statistic=statistic)
    if not rows:
        return
    heads = list(_by_site(rows, rows[0].null, "mean").values())
    places = range(len(heads))
    low = scale([min(values) for values in heads])
    high = scale([max(values) for values in heads])
    axes.fill_between(places, low, high, color=one.look.colour, alpha=0.16, lw=0)
    label = one.name
    null_colour = one.look.colour
    if quiet:
        label = "observed"
        null_colour = LIGHT["quiet"]
    marker = ""
    if len(heads) <= 24:
        marker = one.look.marker
    means = scale([_mean(values) for values in heads])
    axes.plot(places, means, color=one.look.colour, marker=marker, markersize=3.5, label=label)
    for null in telling_nulls(rows):
        chance = scale([_mean(values) for values in _by_site(rows, null, "null_mean").values()])
        axes.plot(places, chance, color=null_colour, linestyle=DASHES[null], linewidth=1.3, label=null)


def _by_site(rows: Sequence[Row], null: str | None, column: str) -> dict[str, list[float]]:
    """What the rows of one null hold in a column, head by head, for every site in order."""
    found: dict[str, list[float]] = {row.site: [] for row in rows}
    for row in rows:
        value = getattr(row, column)
        if row.null == null and value is not None:
            found[row.site].append(value)
    return found


def _mean(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    return statistics.fmean(values)


def _label(one: Shown, shown: Sequence[Shown]) -> str:
    if len(shown) > 1:
        return one.name
    return "observed"


def power_of_ten(power: float) -> str:
    """10⁻³, as a tick says the `power` −3."""
    return "10" + f"{power:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _nearest(rows: Sequence[Row]) -> str | None:
    """The null whose mean comes nearest to what was observed."""
    gaps = {
        null: abs(
            statistics.fmean(row.mean - row.null_mean for row in rows if row.null == null and row.null_mean is not None)
        )
        for null in telling_nulls(rows)
    }
    return min(gaps, key=lambda null: gaps[null], default=None)


def _grid(rows: Sequence[Row], column: str, null: str | None) -> np.ndarray:
    sites = list(dict.fromkeys(row.site for row in rows))
    heads = 1 + max(row.head or 0 for row in rows)
    grid = np.full((len(sites), heads), np.nan)
    for row in rows:
        if row.null == null:
            _set(grid, sites.index(row.site), row.head or 0, getattr(row, column))
    return grid


def _set(grid: np.ndarray, row: int, column: int, value: float | None) -> None:
    if value is not None:
        grid[row, column] = value
