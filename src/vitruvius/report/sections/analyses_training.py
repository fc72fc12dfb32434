"""Inside attention over training: the analyses that ran after epochs, on fixed training and validation images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitruvius.analysis import read_rows
from vitruvius.report._blocks import Block, Drawing, Key
from vitruvius.report._markup import inline_svg
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.sections.analyses_curves import draw_training
from vitruvius.report.sections.analyses_tables import slug
from vitruvius.report.sections.analyses_words import heading, words
from vitruvius.report.style import LINES, series

MOST = 6  # statistics of an analysis that are drawn


@section("analyses_training", title="Inside attention over training", order=22)
def analyses_training(runs: Sequence[Run]) -> Sequence[Block]:
    """One group of panels for each run and analysis. `runs` are those of the page."""
    blocks: list[Block] = []
    for run in runs:
        rows = read_rows(run.folder)
        for analysis in dict.fromkeys(str(row["analysis"]) for row in rows):
            blocks.append(_drawing(run, analysis, [row for row in rows if row["analysis"] == analysis]))
    return blocks


def _drawing(run: Run, analysis: str, rows: list[dict[str, Any]]) -> Drawing:
    names = list(dict.fromkeys(str(row["statistic"]) for row in rows))[:MOST]
    name = f"training-{run.index}-{slug(analysis)}"
    panels = [
        inline_svg(
            draw_training(rows, analysis, [statistic], legend=False, title=words(statistic)),
            name=f"{name}-{place}",
            alt=f"{words(statistic)} over epochs of {run.name}; the numbers are in the table.",
        )
        for place, statistic in enumerate(names)
    ]
    flat = [_flat(run, row) for row in rows]
    caption = f"{run.name}: {heading(analysis)}, mean over layers, heads and the same images after every epoch."
    return Drawing(name=name, panels=panels, caption=caption, rows=flat, legend=_batch_keys(rows))


def _flat(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """A row for a table: epochs counted from 1, without the numbers of each site."""
    numbers = {key: value for key, value in row.items() if key != "by_site"}
    return {"run": run.name, **numbers, "epoch": row["epoch"] + 1}


def _batch_keys(rows: Sequence[dict[str, Any]]) -> list[Key]:
    batches = list(dict.fromkeys(str(row["batch"]) for row in rows))
    strokes = [line[1] if isinstance(line, tuple) else () for line in LINES]
    return [
        Key(text=batch, colour=series(0).name, dashes=" ".join(f"{1.8 * s:g}" for s in strokes[place % len(LINES)]))
        for place, batch in enumerate(batches)
    ]
