"""What the studies' figures share: panels in a grid, and lines with bands."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitruvius._style import series
from vitruvius.studies._base import Row

Band = tuple[float, float, float]  # low, middle, high


def panels(
    titles: Sequence[str], columns: int, size: tuple[float, float], margin: tuple[float, float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with one pair of axes per title; `size` of each and the `margin` around all are inches."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(margin[0] + size[0] * columns, margin[1] + size[1] * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False, **shared).flatten())
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(title)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return figure, every[: len(titles)]


def draw_line(axes: Axes, index: int, label: str, points: Mapping[float, Band], alpha: float = 0.2) -> None:
    """The line of number `index` through the middles, and a band from low to high."""
    look = series(index)
    lows, middles, highs = zip(*points.values(), strict=True)
    axes.plot(list(points), middles, marker=look.marker, color=look.colour, label=label)
    axes.fill_between(list(points), lows, highs, color=look.colour, alpha=alpha, linewidth=0)


def draw_accuracy(axes: Axes, index: int, label: str, rows: Iterable[Row]) -> None:
    """Accuracy with its interval against ε."""
    rows = sorted(rows, key=lambda row: float(row["eps"]))
    points = {255 * row["eps"]: (100 * row["low"], 100 * row["accuracy"], 100 * row["high"]) for row in rows}
    draw_line(axes, index, label, points)


def gather(rows: Iterable[Row], across: str, column: str) -> dict[Any, list[float]]:
    """The values of a `column` by those of another, in order; rows without a value are left out."""
    groups: dict[Any, list[float]] = {}
    for row in sorted(rows, key=lambda row: float(row[across] or 0)):
        if row[column] is not None:
            groups.setdefault(row[across], []).append(row[column])
    return groups


def spread(values: Sequence[float]) -> Band:
    """The least, the mean and the largest."""
    return min(values), statistics.mean(values), max(values)


def names(rows: Iterable[Row], column: str = "model") -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[column] for row in rows))
