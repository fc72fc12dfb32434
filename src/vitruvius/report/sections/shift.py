"""Shift: accuracy of every run under every corruption and severity as heat maps and curves, and on natural shifts."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.evaluation.shift_report import PartScore, ShiftReport
from vitruvius.report._blocks import Block, Drawing
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import run_keys, shift_names
from vitruvius.report._numbers import percent
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.sections.shift_figures import draw_heat, draw_severities, mean_by_severity
from vitruvius.report.sections.shift_tables import corruption_table, natural_table


@section("shift", title="Shift", order=45)
def shift(runs: Sequence[Run]) -> Sequence[Block]:
    """Heat maps of corruption and severity, accuracy over severity, mCE, and natural shifts.

    `runs` are those of the page.
    """
    blocks: list[Block] = []
    for name in shift_names(runs):
        graded = [run for run in runs if name in run.shifts and run.shifts[name].accuracies]
        if graded:
            blocks += [_heat(graded, name), _severities(graded, name), corruption_table(graded, name)]
    natural = natural_table(runs)
    if natural is not None:
        return [*blocks, natural]
    return blocks


def _heat(runs: Sequence[Run], name: str) -> Drawing:
    panels = [
        inline_svg(draw_heat(run.shifts[name], run.name), name=f"heat-{name}-{run.index}", alt=_alt(run, name))
        for run in runs
    ]
    rows = []
    for run in runs:
        report = run.shifts[name]
        rows += [_row(run, report, part) for part in report.parts if part.severity is not None]
    caption = f"{name}: accuracy in per cent, corruptions down and severities across; the darker, the more errors."
    if any(run.shifts[name].drawn for run in runs):
        caption += " Drawn: in place of the photographs of the published sets, and harder."
    return Drawing(name=f"{name}-accuracy", panels=panels, caption=caption, rows=rows)


def _row(run: Run, report: ShiftReport, part: PartScore) -> dict[str, object]:
    """One cell of the heat map, as the file of its numbers has it."""
    return {
        "run": run.name,
        "corruption": report.label(part.group),
        "severity": part.severity,
        "accuracy": part.accuracy,
        "low": part.low,
        "high": part.high,
        "n": part.n,
        "ece": part.calibration.get("ece"),
        "aurra": part.aurra,
    }


def _severities(runs: Sequence[Run], name: str) -> Drawing:
    curves = {run.name: mean_by_severity(run.shifts[name]) for run in runs}
    rows = [{"run": run, "severity": s, "accuracy": a} for run, curve in curves.items() for s, a in curve.items()]
    ends = "; ".join(
        f"{run}: " + ", ".join(f"{percent(a)} at severity {s}" for s, a in curve.items())
        for run, curve in curves.items()
    )
    drawn = inline_svg(draw_severities(runs, name), name=f"severity-{name}", alt=f"Accuracy over severity. {ends}.")
    over = "corruptions"
    if any(len(run.shifts[name].averaged) < len(run.shifts[name].accuracies) for run in runs):
        over = "the corruptions of the benchmark"
    caption = f"{name}: accuracy averaged over {over}; severity 0 is clean where it was evaluated."
    return Drawing(name=f"{name}-severity", panels=[drawn], caption=caption, rows=rows, legend=run_keys(runs))


def _alt(run: Run, name: str) -> str:
    report = run.shifts[name]
    means = [f"{report.label(one)} {percent(sum(row.values()) / len(row))}" for one, row in report.accuracies.items()]
    return f"Heat map of accuracy by corruption and severity, {run.name}. Means: {', '.join(means)}."
