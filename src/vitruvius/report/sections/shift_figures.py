"""Figures of shift: a heat map of corruption and severity, and accuracy over severity."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from vitruvius.evaluation.shift_report import ShiftReport
from vitruvius.report._runs import Run
from vitruvius.report.style import figure_style, heat, new_axes

DARK_INK, LIGHT_INK = "#1b1512", "#fffdf7"  # on the colours of the map, the same by day and by night


def draw_heat(report: ShiftReport, title: str) -> Figure:
    """Corruptions down, severities across, accuracy in per cent in every cell; darker is worse.

    `report` is that of one run and set; `title` goes above it.
    """
    grid = report.accuracies
    columns = sorted({severity for row in grid.values() for severity in row})
    with figure_style():
        figure, axes = new_axes(1.9 + 0.62 * len(columns), 0.75 + 0.29 * len(grid))
        for y, row in enumerate(grid.values()):
            for severity, accuracy in row.items():
                _draw_cell(axes, columns.index(severity), y, accuracy)
        axes.set_xticks(range(len(columns)), [str(severity) for severity in columns])
        axes.set_yticks(range(len(grid)), [report.label(name).replace("_", " ") for name in grid])
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(grid) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.set_title(title)
        axes.set_xlabel("severity")
    return figure


def draw_severities(runs: Sequence[Run], name: str) -> Figure:
    """One line per run: mean accuracy over corruptions, from clean onwards.

    `runs` are those of the page; `name` is that of the set.
    """
    with figure_style():
        figure, axes = new_axes()
        for run in runs:
            curve = mean_by_severity(run.shifts[name])
            axes.plot(list(curve), list(curve.values()), color=run.look.colour, marker=run.look.marker, label=run.name)
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.set_xticks(sorted({s for run in runs for s in mean_by_severity(run.shifts[name])}))
        axes.set_xlabel("severity")
        axes.set_ylabel("accuracy")
        axes.set_title("mean over corruptions")
    return figure


def mean_by_severity(report: ShiftReport) -> dict[int, float]:
    """Severity → accuracy averaged over the corruptions of the benchmark that have it; 0 is clean.

    `report` is that of one run and set.
    """
    columns: dict[int, list[float]] = {}
    if report.clean_error is not None:
        columns[0] = [1 - report.clean_error]
    for row in report.averaged.values():
        for severity, accuracy in row.items():
            columns.setdefault(severity, []).append(accuracy)
    return {severity: sum(columns[severity]) / len(columns[severity]) for severity in sorted(columns)}


def _draw_cell(axes: Axes, x: int, y: int, accuracy: float) -> None:
    """Errors from 0 to 1 take the whole range of colours; a thin gap parts the cells."""
    colour = heat()(1 - accuracy)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0))
    red, green, blue, _ = colour
    ink = LIGHT_INK
    if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5:
        ink = DARK_INK
    axes.text(x, y, f"{100 * accuracy:.0f}", ha="center", va="center", color=ink, fontsize=9.5)
