"""Threats: accuracy of every run under every threat with 95 % intervals, as dots and as a table; and over ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from vitruvius._format import DASH, format_number, percent
from vitruvius._style import figure_style, in_percent, new_axes
from vitruvius.report.blocks import Block, Cell, Drawing, Table, run_keys, section
from vitruvius.report.run import Run, Threat, explain_doubts, label_threats

NUMBERS = ("name", "spec", "eps", "accuracy", "low", "high", "n", "top5", "loss", "seconds")
Curve = list[tuple[float, Threat]]


@section("threats", title="Threats", order=30)
def threats(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy under each threat with its interval, as dots and as a table."""
    labels = label_threats(runs)
    if not labels:
        return []
    evaluated = [run for run in runs if run.threats]
    rows = [
        {"run": run.name, **{key: getattr(threat, key) for key in NUMBERS}, "doubts": ", ".join(threat.doubts)}
        for run in evaluated
        for threat in [*run.threats, *filter(None, [_worst_case(run)])]
    ]
    lines = [
        f"{run.name}: " + ", ".join(f"{labels[t.spec]} {100 * t.accuracy:.4g} per cent" for t in run.threats)
        for run in evaluated
    ]
    drawing = Drawing(
        name="threats",
        panels=[(draw_threats(evaluated), f"Dot plot of accuracy under each threat. {'; '.join(lines)}.")],
        caption="Share of test images classified correctly; bars are 95 % Wilson intervals."
        + explain_doubts(evaluated),
        rows=rows,
        legend=run_keys(evaluated),
    )
    return [drawing, _table(evaluated, labels, rows)]


def draw_threats(runs: Sequence[Run]) -> Figure:
    """Dots with intervals: one line per threat, one colour per run."""
    labels = label_threats(runs)
    with figure_style():
        figure, axes = new_axes(5.4, 0.9 + len(labels) * max(0.32, 0.115 * len(runs)))
        for place, spec in enumerate(labels):
            for step, run in enumerate(runs):
                if (threat := run.under(spec)) is not None:
                    y = place + (step - (len(runs) - 1) / 2) * 0.64 / max(len(runs), 2)
                    below = 0.0 if threat.low is None else max(0.0, threat.accuracy - threat.low)
                    above = 0.0 if threat.high is None else max(0.0, threat.high - threat.accuracy)
                    look: dict[str, Any] = {"color": run.look.colour, "fmt": run.look.marker, "markersize": 5.5}
                    axes.errorbar([threat.accuracy], [y], xerr=[[below], [above]], elinewidth=1.6, **look)
        axes.set_yticks(range(len(labels)), list(labels.values()))
        axes.set(ylim=(len(labels) - 0.5, -0.5), xlim=(-0.02, 1.02), xlabel="accuracy")
        in_percent(axes.xaxis)
        axes.grid(axis="y", visible=False)
    return figure


def _table(runs: Sequence[Run], labels: dict[str, str], rows: list[dict[str, object]]) -> Table:
    cells = [
        [Cell(text=label, detail="" if spec == label else spec), *(_cell(run.under(spec)) for run in runs)]
        for spec, label in labels.items()
    ]
    worst = [_worst_case(run) for run in runs]
    if any(worst):
        cells.append([Cell(text="worst case", detail="right under every threat"), *map(_cell, worst)])
    titles, caption = ["threat", *(run.name for run in runs)], "Top-1 accuracy and 95 % interval."
    return Table(name="threats-table", titles=titles, cells=cells, rows=rows, caption=caption)


def _worst_case(run: Run) -> Threat | None:
    """Of a run that was attacked; clean accuracy beside another run's worst case would look like robustness."""
    return run.worst_case if len(run.threats) > 1 else None


def _cell(threat: Threat | None) -> Cell:
    if threat is None:
        return Cell(text=DASH)
    return Cell(text=percent(threat.accuracy), value=threat.accuracy, detail=threat.detail)


@section("strengths", title="Strength", order=40)
def strengths(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy over ε for every attack with at least two strengths."""
    attacks = collect_strengths(runs)
    if not attacks:
        return []
    shown = sorted({index for curves in attacks.values() for index in curves})
    rows = [
        {"run": runs[index].name, "attack": name, "eps": eps, "accuracy": t.accuracy, "low": t.low, "high": t.high}
        for name, curves in attacks.items()
        for index, points in curves.items()
        for eps, t in points
    ]
    caption = (
        "Accuracy as the attack may change each image more; ε\u00a0=\u00a00 is clean. Bands are 95 % Wilson intervals."
    )
    return [
        Drawing(
            name="strengths",
            panels=[(draw_strengths(runs, name, curves), _alt(runs, name, curves)) for name, curves in attacks.items()],
            caption=caption + explain_doubts(runs),
            rows=rows,
            legend=run_keys([runs[index] for index in shown]),
        )
    ]


def collect_strengths(runs: Sequence[Run]) -> dict[str, dict[int, Curve]]:
    """Attack → place of the run → points (ε, threat) from clean onwards; attacks with one strength are left out."""
    attacks: dict[str, dict[int, Curve]] = {}
    for index, run in enumerate(runs):
        for threat in run.threats:
            if threat.eps is not None and threat.name != "clean":
                attacks.setdefault(threat.family, {}).setdefault(index, []).append((threat.eps, threat))
    for curves in attacks.values():
        for index, points in curves.items():
            if (clean := runs[index].clean) is not None:
                points.append((0.0, clean))
            points.sort(key=lambda point: point[0])
    return {name: curves for name, curves in attacks.items() if len(_strengths(curves) - {0.0}) >= 2}


def _strengths(curves: dict[int, Curve]) -> set[float]:
    return {eps for points in curves.values() for eps, _ in points}


def draw_strengths(runs: Sequence[Run], name: str, curves: dict[int, Curve]) -> Figure:
    """One panel for an attack: a line per run (by its place among `runs`), a band for the interval."""
    with figure_style():
        figure, axes = new_axes()
        for index, points in curves.items():
            look = runs[index].look
            x, under = zip(*points, strict=True)
            y = [threat.accuracy for threat in under]
            low = [threat.accuracy if threat.low is None else threat.low for threat in under]
            high = [threat.accuracy if threat.high is None else threat.high for threat in under]
            axes.plot(x, y, color=look.colour, marker=look.marker, label=runs[index].name)
            axes.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)
        ticks = _ticks(sorted(_strengths(curves)))
        axes.set_xticks(ticks, [format_number(eps) for eps in ticks])
        axes.set(ylim=(-0.02, 1.02), xlabel="ε (of pixels from 0 to 1)", ylabel="accuracy", title=name)
        in_percent(axes.yaxis)
    return figure


def _ticks(strengths: list[float]) -> list[float]:
    """The strengths with room for a label: both ends, and from the largest down those a ninth of the axis apart."""
    kept, room = strengths[-1:], strengths[-1] / 9
    for eps in reversed(strengths[1:-1]):
        if kept[-1] - eps >= room and eps - strengths[0] >= room:
            kept.append(eps)
    return strengths[:1] + kept[::-1] if len(strengths) > 1 else kept


def _alt(runs: Sequence[Run], name: str, curves: dict[int, Curve]) -> str:
    lines = [
        f"{runs[index].name}: " + ", ".join(f"{percent(t.accuracy)} at ε {format_number(eps)}" for eps, t in points)
        for index, points in curves.items()
    ]
    return f"Line chart of accuracy over ε for {name}. {'; '.join(lines)}."
