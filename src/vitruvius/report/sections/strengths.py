"""Accuracy against ε: one panel per attack that was run at several strengths, from clean onwards."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitruvius.report._blocks import Block, Drawing
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import family, run_keys
from vitruvius.report._numbers import percent, pixels
from vitruvius.report._runs import Run, Threat, say_doubts
from vitruvius.report._section import section
from vitruvius.report.style import figure_style, new_axes

Curve = list[tuple[float, Threat]]


@section("strengths", title="Strength", order=40)
def strengths(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy over ε for every attack with at least two strengths. `runs` are those of the page."""
    attacks = collect_strengths(runs)
    if not attacks:
        return []
    panels = [
        inline_svg(draw_strengths(runs, name, curves), name=f"strengths-{place}", alt=_alt(runs, name, curves))
        for place, (name, curves) in enumerate(attacks.items())
    ]
    shown = sorted({index for curves in attacks.values() for index in curves})
    legend = run_keys([runs[index] for index in shown])
    caption = (
        "Accuracy as the attack may change each image more; ε\u00a0=\u00a00 is clean. Bands are 95 % Wilson intervals."
    ) + say_doubts(runs)
    return [Drawing(name="strengths", panels=panels, caption=caption, rows=_rows(runs, attacks), legend=legend)]


def collect_strengths(runs: Sequence[Run]) -> dict[str, dict[int, Curve]]:
    """Attack → run index → points (ε, threat) in order; attacks with fewer than two strengths are left out.

    `runs` are those of the page.
    """
    attacks: dict[str, dict[int, Curve]] = {}
    for index, run in enumerate(runs):
        for eps, threat in _with_radius(run):
            attacks.setdefault(family(threat), {}).setdefault(index, []).append((eps, threat))
    for curves in attacks.values():
        for index, points in curves.items():
            _begin_with_clean(points, runs[index])
    return {name: curves for name, curves in attacks.items() if _strengths(curves) >= 2}


def _with_radius(run: Run) -> Curve:
    """The attacks of a run that have one."""
    return [(threat.eps, threat) for threat in run.threats if threat.eps is not None and threat.name != "clean"]


def _begin_with_clean(points: Curve, run: Run) -> None:
    clean = run.threat("clean")
    if clean is not None:
        points.append((0.0, clean))
    points.sort(key=lambda point: point[0])


def draw_strengths(runs: Sequence[Run], name: str, curves: dict[int, Curve]) -> Figure:
    """One panel: a line per run, a band for the interval.

    `runs` are those of the page; `name` is that of the attack; `curves` are its points, by the place of a run among
    `runs`.
    """
    with figure_style():
        figure, axes = new_axes()
        for index, points in curves.items():
            _draw_run(axes, runs[index], points)
        ticks = _ticks(sorted({eps for points in curves.values() for eps, _ in points}))
        axes.set_xticks(ticks, [_tick_label(eps) for eps in ticks])
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.set_xlabel("ε (of pixels from 0 to 1)")
        axes.set_ylabel("accuracy")
        axes.set_title(name)
    return figure


def _draw_run(axes: Axes, run: Run, points: Curve) -> None:
    look = run.look
    strengths: list[float] = []
    accuracies: list[float] = []
    low: list[float] = []
    high: list[float] = []
    for eps, threat in points:
        strengths.append(eps)
        accuracies.append(threat.accuracy)
        low.append(_known(threat.low, threat.accuracy))
        high.append(_known(threat.high, threat.accuracy))
    axes.plot(strengths, accuracies, color=look.colour, marker=look.marker, label=run.name)
    axes.fill_between(strengths, low, high, color=look.colour, alpha=0.16, linewidth=0)


def _known(value: float | None, otherwise: float) -> float:
    if value is None:
        return otherwise
    return value


def _tick_label(eps: float) -> str:
    if eps == 0:
        return "0"
    return pixels(eps)


def _ticks(strengths: list[float]) -> list[float]:
    """The strengths with room for a label: both ends, and from the largest down those a ninth of the axis apart."""
    kept, room = strengths[-1:], strengths[-1] / 9
    for eps in reversed(strengths[1:-1]):
        if kept[-1] - eps >= room and eps - strengths[0] >= room:
            kept.append(eps)
    if len(strengths) > 1:
        return strengths[:1] + kept[::-1]
    return kept


def _strengths(curves: dict[int, Curve]) -> int:
    return len({eps for points in curves.values() for eps, _ in points if eps > 0})


def _rows(runs: Sequence[Run], attacks: dict[str, dict[int, Curve]]) -> list[dict[str, object]]:
    return [
        {"run": runs[index].name, "attack": name, "eps": eps, "accuracy": t.accuracy, "low": t.low, "high": t.high}
        for name, curves in attacks.items()
        for index, points in curves.items()
        for eps, t in points
    ]


def _alt(runs: Sequence[Run], name: str, curves: dict[int, Curve]) -> str:
    lines = [
        f"{runs[index].name}: " + ", ".join(f"{percent(t.accuracy)} at ε {pixels(eps)}" for eps, t in points)
        for index, points in curves.items()
    ]
    return f"Line chart of accuracy over ε for {name}. " + "; ".join(lines) + "."
