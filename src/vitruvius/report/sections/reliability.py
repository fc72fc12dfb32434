"""Calibration: reliability diagrams, accuracy over confidence above a histogram, of clean and of shifted images."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitruvius.report._blocks import Block, Drawing
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import run_keys, shift_names
from vitruvius.report._numbers import percent
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.style import LIGHT, figure_style

Bins = list[dict[str, float]]
Diagram = tuple[Run, Bins]


@section("reliability", title="Calibration", order=46)
def reliability(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy over confidence, clean and shifted, of every run. `runs` are those of the page."""
    diagrams = collect_diagrams(runs)
    if not diagrams:
        return []
    panels = [
        inline_svg(draw_reliability(found, title), name=f"reliability-{place}", alt=_alt(title, found))
        for place, (title, found) in enumerate(diagrams.items())
    ]
    rows = [
        {"run": run.name, "images": title, **one}
        for title, found in diagrams.items()
        for run, bins in found
        for one in bins
    ]
    caption = (
        "A model that knows how sure it may be lies on the dashed diagonal, an overconfident one below it; "
        "the histogram shows how many images have each confidence."
    )
    shown = sorted({run.index for found in diagrams.values() for run, _ in found})
    legend = run_keys([runs[index] for index in shown])
    return [Drawing(name="reliability", panels=panels, caption=caption, rows=rows, legend=legend)]


def collect_diagrams(runs: Sequence[Run]) -> dict[str, list[Diagram]]:
    """clean, then each shift → the runs that have such a diagram; images from outside have none.

    `runs` are those of the page.
    """
    found: dict[str, list[Diagram]] = {}
    for run in runs:
        bins = _clean_bins(run)
        if bins:
            found.setdefault("clean", []).append((run, bins))
    for name in shift_names(runs):
        for run in runs:
            bins = _shifted_bins(run, name)
            if bins:
                found.setdefault(name, []).append((run, bins))
    return found


def _shifted_bins(run: Run, name: str) -> Bins | None:
    report = run.shifts.get(name)
    if report is None or any(part.outside for part in report.parts):
        return None
    return report.reliability.get("shifted")


def _clean_bins(run: Run) -> Bins | None:
    """Of clean images, from the first shift that came with them."""
    for report in run.shifts.values():
        bins = report.reliability.get("clean")
        if bins:
            return bins
    return None


def draw_reliability(diagrams: Sequence[Diagram], title: str) -> Figure:
    """Above, accuracy over confidence and the diagonal of honesty; below, how many images have which confidence.

    `diagrams` are drawn into one figure, a colour each; `title` goes above them.
    """
    with figure_style():
        figure = Figure(figsize=(4.5, 4.3), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        above.plot([0, 1], [0, 1], color=LIGHT["quiet"], linewidth=1, linestyle=(0, (3, 3)))
        for run, one in diagrams:
            look = {"color": run.look.colour, "linewidth": 1.6}
            above.plot([b["confidence"] for b in one], [b["accuracy"] for b in one], marker=run.look.marker, **look)
            _draw_histogram(below, one, run.look.colour)
        above.set_title(title)
        above.set_ylim(-0.02, 1.02)
        above.set_ylabel("accuracy")
        below.set_xlim(-0.01, 1.01)
        below.set_xlabel("confidence")
        below.set_ylabel("images")
        for axis in (above.yaxis, below.xaxis, below.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    return figure


def bin_error(bins: Bins) -> float:
    """ECE of a diagram. `bins` are its bars."""
    total = sum(b["count"] for b in bins)
    return sum(b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / total


def _draw_histogram(axes: Axes, bins: Bins, colour: str) -> None:
    total = sum(b["count"] for b in bins)
    for b in bins:
        x, share = [b["low"], b["low"], b["high"], b["high"]], b["count"] / total
        axes.fill(x, [0, share, share, 0], facecolor=colour, alpha=0.18, linewidth=0)
        axes.plot([b["low"], b["high"]], [share, share], color=colour, linewidth=1.6)


def _alt(kind: str, found: Sequence[Diagram]) -> str:
    errors = ", ".join(f"{run.name} {percent(bin_error(bins))}" for run, bins in found)
    return f"Reliability diagram, {kind}. Expected calibration error: {errors}."
