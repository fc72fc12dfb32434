"""Threats: accuracy of every run under every threat with 95 % intervals, as dots and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitruvius.report._blocks import Block, Cell, Column, Drawing, Table
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import label_threats, run_keys
from vitruvius.report._numbers import percent, short
from vitruvius.report._runs import Run, Threat, say_doubts
from vitruvius.report._section import section
from vitruvius.report.style import figure_style, new_axes


@section("threats", title="Threats", order=30)
def threats(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy under each threat with its interval, as dots and as a table. `runs` are those of the page."""
    labels = label_threats(runs)
    if not labels:
        return []
    evaluated = [run for run in runs if run.threats]
    rows = [row for run in evaluated for row in _rows(run)]
    drawing = Drawing(
        name="threats",
        panels=[inline_svg(draw_threats(evaluated), name="threats", alt=_alt(evaluated, labels))],
        caption="Share of test images classified correctly; bars are 95 % Wilson intervals." + say_doubts(evaluated),
        rows=rows,
        legend=run_keys(evaluated),
    )
    return [drawing, _table(evaluated, labels, rows)]


def draw_threats(runs: Sequence[Run]) -> Figure:
    """Dots with intervals: one line per threat, one colour per run. `runs` are those of the page."""
    labels = label_threats(runs)
    with figure_style():
        figure, axes = new_axes(5.4, 0.9 + len(labels) * max(0.32, 0.115 * len(runs)))
        for place, spec in enumerate(labels):
            for step, run in enumerate(runs):
                if (threat := _find(run, spec)) is not None:
                    _draw_dot(axes, run, threat, place + (step - (len(runs) - 1) / 2) * 0.64 / max(len(runs), 2))
        axes.set_yticks(range(len(labels)), list(labels.values()))
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.set_xlabel("accuracy")
        axes.grid(axis="y", visible=False)
    return figure


def _draw_dot(axes: Axes, run: Run, threat: Threat, y: float) -> None:
    look = run.look
    axes.errorbar(
        [threat.accuracy],
        [y],
        xerr=_whiskers(threat),
        color=look.colour,
        fmt=look.marker,
        markersize=5.5,
        elinewidth=1.6,
    )


def _whiskers(threat: Threat) -> list[list[float]]:
    """Lengths of the bar below and above the dot; none where no interval is known."""
    below = 0.0
    if threat.low is not None:
        below = threat.accuracy - threat.low
    above = 0.0
    if threat.high is not None:
        above = threat.high - threat.accuracy
    return [[max(0.0, below)], [max(0.0, above)]]


def _find(run: Run, spec: str) -> Threat | None:
    return next((threat for threat in run.threats if threat.spec == spec), None)


def _table(runs: Sequence[Run], labels: dict[str, str], rows: list[dict[str, object]]) -> Table:
    columns = [Column(title="threat"), *(Column(title=run.name, numeric=True) for run in runs)]
    cells = []
    for spec, label in labels.items():
        cells.append([Cell(text=label, detail=_detail(spec, label)), *(_cell(run, spec) for run in runs)])
    worst = [_worst_case(run) for run in runs]
    if any(worst):
        cells.append([Cell(text="worst case", detail="right under every threat"), *map(_accuracy, worst)])
    return Table(
        name="threats-table", columns=columns, cells=cells, rows=rows, caption="Top-1 accuracy and 95 % interval."
    )


def _worst_case(run: Run) -> Threat | None:
    """Of a run that was attacked; clean accuracy beside another run's worst case would look like robustness."""
    if len(run.threats) > 1:
        return run.worst_case
    return None


def _detail(spec: str, label: str) -> str:
    if spec == label:
        return ""
    return spec


def _cell(run: Run, spec: str) -> Cell:
    return _accuracy(_find(run, spec))


def _accuracy(threat: Threat | None) -> Cell:
    if threat is None:
        return Cell(text="–")
    return Cell(text=percent(threat.accuracy), value=threat.accuracy, detail=threat.detail)


def _rows(run: Run) -> list[dict[str, object]]:
    keys = ("name", "spec", "eps", "accuracy", "low", "high", "n", "top5", "loss", "seconds")
    worst = _worst_case(run)
    rows = []
    for threat in [*run.threats, *([worst] if worst else [])]:
        row: dict[str, object] = {"run": run.name, **{key: getattr(threat, key) for key in keys}}
        rows.append({**row, "doubts": ", ".join(threat.doubts)})
    return rows


def _alt(runs: Sequence[Run], labels: dict[str, str]) -> str:
    parts = [
        f"{run.name}: " + ", ".join(f"{labels[t.spec]} {short(100 * t.accuracy)} per cent" for t in run.threats)
        for run in runs
    ]
    return "Dot plot of accuracy under each threat. " + "; ".join(parts) + "."
