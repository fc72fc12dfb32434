"""The tables of an analysis: by layer, with the nearest null below each number; and the rows of their CSV files."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.analysis import Row
from vitruvius.analysis.table import SAME_BY_CONSTRUCTION as KEPT
from vitruvius.analysis.table import Layer, layers_of, number
from vitruvius.report._blocks import Cell, Column, Table
from vitruvius.report.sections.analyses_figures import Shown
from vitruvius.report.sections.analyses_gallery import MOST, statistics_of
from vitruvius.report.sections.analyses_words import words


def layer_table(one: Shown, analysis: str) -> Table:
    """Sites down, the first statistics across. `one` is a run with its table, which holds the `analysis`."""
    names = statistics_of(one.table, analysis)[: 2 * MOST]
    layers = layers_of(one.table.select(analysis=analysis))
    sites = list(dict.fromkeys(site for site, _ in layers))
    cells = []
    for site in sites:
        cells.append([Cell(text=site), *(_cell(layers.get((site, name))) for name in names)])
    counts = [_count([layers[site, name] for site in sites if (site, name) in layers]) for name in names]
    cells.append([Cell(text="heads beyond chance"), *counts])
    return Table(
        name=f"{slug(analysis)}-{slug(one.name)}",
        columns=[Column(title="site"), *(Column(title=words(name), numeric=True) for name in names)],
        cells=cells,
        rows=layer_rows(one, analysis),
        caption="Mean over heads and images; below it the nearest null.",
    )


def _cell(found: Layer | None) -> Cell:
    if found is None:
        return Cell(text="–")
    detail = ""
    if found.chance is not None:
        detail = f"chance {number(found.chance)}"
    return Cell(text=number(found.value), value=found.value, detail=detail)


def _count(own: Sequence[Layer]) -> Cell:
    judged, beyond = sum(found.judged for found in own), sum(found.beyond for found in own)
    if judged:
        return Cell(text=f"{beyond} of {judged}", value=float(beyond))
    return Cell(text="no null tells")


def layer_rows(one: Shown, analysis: str) -> list[dict[str, object]]:
    """By layer, null by null: what the page's CSV files hold.

    `one` is a run with its table, which holds the `analysis`.
    """
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in one.table.select(analysis=analysis):
        groups.setdefault((row.site, row.statistic, row.null), []).append(row)
    return [_csv_row(one.name, own) for own in groups.values()]


def _csv_row(run: str, rows: Sequence[Row]) -> dict[str, object]:
    """The heads of one site under one null, together."""
    first = rows[0]
    chance = [row.null_mean for row in rows if row.null_mean is not None]
    beyond: int | str = sum(row.claim.startswith(("above", "below")) for row in rows)
    if all(row.claim == KEPT for row in rows):
        beyond = ""
    return {
        "run": run,
        "site": first.site,
        "statistic": first.statistic,
        "heads": len(rows),
        "images": first.n,
        "mean": _rounded([row.mean for row in rows]),
        "null": first.null,
        "null_mean": _rounded(chance),
        "heads_beyond": beyond,
    }


def _rounded(values: Sequence[float]) -> str:
    if values:
        return f"{sum(values) / len(values):.5g}"
    return ""


def slug(name: str) -> str:
    """A `name` in small letters and hyphens, for files and anchors."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
