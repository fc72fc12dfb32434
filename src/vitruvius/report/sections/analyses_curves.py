"""Figures of analyses along one more axis: spectra, gammas by column, rollout maps; and curves over training.

H heads, K positions
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitruvius.analysis.shipped import ShippedCurve
from vitruvius.analysis.table import Curve, Table
from vitruvius.report.sections.analyses_figures import DASHES, Scale, stand_alone
from vitruvius.report.sections.analyses_words import axis_label, heading, words
from vitruvius.report.style import LIGHT, LINES, figure_style, heat, new_axes, series


def draw_curves(table: Table, analysis: str, statistic: str, *, xlabel: str, legend: bool = False) -> Figure:
    """A statistic along its axis in the first, middle and last layer: mean over heads ± deviation.

    The nulls of the middle are dashed. `table` holds the `analysis` and its `statistic`; `xlabel` names the axis;
    `legend` adds one (default: no).
    """
    curves = [c for c in table.curves if c.analysis == analysis and c.statistic == statistic]
    observed = [curve for curve in curves if curve.null == ""]
    chosen = sorted({0, len(observed) // 2, len(observed) - 1})
    scale = Scale.of(np.concatenate([curve.mean.mean(0) for curve in observed]).tolist())
    title = words(statistic.removesuffix("_by_column"))
    with figure_style():
        figure, axes = new_axes(5.0, 3.1)
        for place in reversed(chosen):
            colour = series(chosen.index(place)).colour
            _draw_spread(axes, observed[place], scale, colour)
            _draw_curve(axes, observed[place], scale, color=colour, label=f"layer {place}")
        middle = observed[chosen[len(chosen) // 2]]
        _draw_nulls(axes, _nulls_of(middle, curves, observed), scale, labelled=legend)
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(axis_label(analysis, statistic))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        scale.label(axes)
        if legend:
            stand_alone(figure, axes, f"{heading(analysis)}: {title}")
        else:  # of layers; the page explains the nulls
            stand_alone(figure, axes, title)
    return figure


def _nulls_of(shown: Curve, curves: Sequence[Curve], observed: Sequence[Curve]) -> list[Curve]:
    """The nulls at the site of a curve, those that differ from what is observed."""
    here = [curve for curve in curves if curve.null and curve.site == shown.site]
    return [curve for curve in here if _differs(curve, observed)]


def _draw_nulls(axes: Axes, nulls: Sequence[Curve], scale: Scale, *, labelled: bool) -> None:
    for curve in nulls:
        label = None
        if labelled:
            label = curve.null
        look: dict[str, Any] = {"color": LIGHT["quiet"], "linestyle": DASHES[curve.null], "linewidth": 1.3}
        _draw_curve(axes, curve, scale, label=label, **look)


def draw_map(table: Table, analysis: str = "rollout", statistic: str = "map") -> Figure:
    """A statistic of patches as a picture, averaged over images: bright where attention ends up.

    `table` holds the `analysis` and its `statistic`.
    """
    curve = next(c for c in table.curves if c.analysis == analysis and c.statistic == statistic and not c.null)
    values = curve.mean.mean(0).numpy()
    side = math.isqrt(len(values))
    with figure_style():
        figure, axes = new_axes(3.6, 3.1)
        grid = values[: side * side].reshape(side, -1)
        picture = axes.imshow(grid * len(values), cmap=heat(), vmin=0, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.set_title("where attention ends up")
        bar = figure.colorbar(picture, ax=axes, shrink=0.9, label="share of a patch × number of patches")
        bar.outline.set_visible(False)
    return figure


def draw_training(
    rows: Sequence[Mapping[str, Any]],
    analysis: str,
    statistics: Sequence[str],
    *,
    shipped: Mapping[str, ShippedCurve] | None = None,
    title: str = "",
    legend: bool = True,
) -> Figure:
    """Statistics over epochs, batches by line, one colour each; `shipped` curves of the reproduction in grey beside.

    rows: of analysis.jsonl.
    analysis: the one that is drawn.
    statistics: of it, each a panel.
    shipped: curves by the name of a statistic; default: none.
    title: above the figure; default: none.
    legend: whether there is one; default: yes.
    """
    lines = _training_lines(rows, analysis, statistics)
    scale = Scale.of([value for _, values, _ in lines for value in values] + _shipped_values(shipped))
    with figure_style():
        figure, axes = new_axes(5.0, 3.1)
        for epochs, values, look in lines:
            axes.plot(epochs, scale(values), **look)
        for name, curve in (shipped or {}).items():
            axes.plot(
                [epoch + 1 for epoch in curve.epochs],
                scale(curve.values),
                color=LIGHT["quiet"],
                linewidth=1.2,
                label=name,
            )
        axes.set_title(title or heading(analysis))
        axes.set_xlabel("epoch")
        axes.set_ylabel(axis_label(analysis, statistics[0]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        scale.label(axes)
        if legend:
            stand_alone(figure, axes, title or heading(analysis))
    return figure


def _training_lines(
    rows: Sequence[Mapping[str, Any]], analysis: str, statistics: Sequence[str]
) -> list[tuple[list[float], list[float], dict[str, Any]]]:
    """(epochs, values, look) of each statistic on each batch."""
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = {}  # statistic → batch → rows
    batches: dict[str, int] = {}  # in order of appearance
    for row in rows:
        if row["analysis"] == analysis:
            batch = str(row["batch"])
            batches.setdefault(batch, len(batches))
            groups.setdefault(row["statistic"], {}).setdefault(batch, []).append(row)
    lines = []
    for place, name in enumerate(statistics):
        for batch, number in batches.items():
            own = groups.get(name, {}).get(batch, [])
            epochs = [float(row["epoch"]) + 1 for row in own]
            values = [float(row["mean"]) for row in own]
            look = {"color": series(place).colour, "linestyle": LINES[number % len(LINES)]}
            lines.append((epochs, values, {**look, "label": f"{words(name)}, {batch}"}))
    return lines


def _shipped_values(shipped: Mapping[str, ShippedCurve] | None) -> list[float]:
    return [value for curve in (shipped or {}).values() for value in curve.values]


def _draw_curve(axes: Axes, curve: Curve, scale: Scale, **look: Any) -> None:
    mean = curve.mean.mean(0).tolist()
    axes.plot(range(1, len(mean) + 1), scale(mean), **look)


def _draw_spread(axes: Axes, curve: Curve, scale: Scale, colour: str) -> None:
    """Mean over heads ± their deviation, as far as an axis of powers of ten can show it."""
    mean = curve.mean.mean(0)
    spread = curve.mean.std(0, correction=0)
    low = scale((mean - spread).tolist())
    high = scale((mean + spread).tolist())
    axes.fill_between(range(1, len(low) + 1), low, high, color=colour, alpha=0.12, linewidth=0)


def _differs(curve: Curve, observed: Sequence[Curve]) -> bool:
    """Whether a null changed the curve of its site at all."""
    own = next(c for c in observed if c.site == curve.site)
    gap = (own.mean - curve.mean).abs().max()
    return bool(gap > 1e-6 * own.mean.abs().max())
