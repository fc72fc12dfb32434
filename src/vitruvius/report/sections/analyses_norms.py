"""The norms ‖φ(q)‖² and ‖h‖² of tokens over layers in one figure, after arXiv:2505.07908: medians, quartiles, tails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitruvius.analysis.norms import QUANTILES
from vitruvius.analysis.table import Curve, Table
from vitruvius.report.sections.analyses_figures import DASHES, power_of_ten, stand_alone
from vitruvius.report.style import figure_style, new_axes, series

JOINT = ("log10_phi2_quantiles", "log10_h2_quantiles")
LABELS = ("‖φ(q)‖²", "‖h‖²")
LOWEST, LOW, MEDIAN, HIGH, HIGHEST = range(len(QUANTILES))


def draw_norms(table: Table, analysis: str = "norms", *, legend: bool = False, title: str = "") -> Figure:
    """Both norms layer by layer on one logarithmic axis; the medians of chance (gaussian heads) are dashed.

    Lines are medians over tokens, dark bands hold the middle half of them, light ones 90 %; all are means over heads
    and images. `table` holds the `analysis` (default: norms); `legend` adds one outside (default: no), and `title` is
    that of the figure.
    """
    with figure_style():
        figure, axes = new_axes(5.0, 3.3)
        draw_norms_on(axes, table, analysis)
        axes.set_title(title or "norms of tokens")
        if legend:
            stand_alone(figure, axes, title or f"{analysis}: norms of tokens")
        else:
            axes.legend(loc="best", fontsize=8.5)
    return figure


def draw_norms_on(axes: Axes, table: Table, analysis: str) -> None:
    """The same on `axes` that are there, from the `analysis` of a `table`."""
    for index, (statistic, label) in enumerate(zip(JOINT, LABELS, strict=True)):
        look = series(index)
        levels = _levels(table, analysis, statistic, "")  # (layers, quantiles)
        layers = range(len(levels))
        band: dict[str, Any] = {"color": look.colour, "linewidth": 0}
        axes.fill_between(layers, levels[:, LOWEST], levels[:, HIGHEST], alpha=0.10, **band)
        axes.fill_between(layers, levels[:, LOW], levels[:, HIGH], alpha=0.25, **band)
        axes.plot(layers, levels[:, MEDIAN], color=look.colour, marker=look.marker, markersize=4, label=label)
        chance = _levels(table, analysis, statistic, "gaussian")
        if len(chance):
            style: dict[str, Any] = {"color": look.colour, "linestyle": DASHES["gaussian"], "linewidth": 1.2}
            axes.plot(range(len(chance)), chance[:, MEDIAN], label=f"{label}, chance", **style)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: power_of_ten(power)))


def _levels(table: Table, analysis: str, statistic: str, null: str) -> Any:
    """log₁₀ of the quantiles, layer by layer, as an array (layers, quantiles); empty where there are none."""
    chosen: Sequence[Curve] = [
        curve
        for curve in table.curves
        if curve.analysis == analysis and curve.statistic == statistic and curve.null == null
    ]
    if not chosen:
        return torch.empty(0, len(QUANTILES)).numpy()
    means = [curve.mean.mean(0) for curve in chosen]  # over heads
    return torch.stack(means).numpy()
