"""The tables of an analysis: by layer, with the nearest null below each number; and the rows of their CSV files."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.analysis.text import KEPT, Layer, layer, number
from vitruvius.report._blocks import Cell, Column, Table
from vitruvius.report.sections.analyses_figures import Shown, words
from vitruvius.report.sections.analyses_gallery import MOST, statistics_of


def layer_table(one: Shown, analysis: str) -> Table:
    """Sites down, the first statistics across."""
    names = statistics_of(one.table, analysis)[: 2 * MOST]
    rows = one.table.select(analysis=analysis)
    sites = list(dict.fromkeys(row.site for row in rows))
    found = {
        (site, name): layer(own)
        for site in sites
        for name in names
        if (own := [row for row in rows if row.site == site and row.statistic == name])
    }
    cells = [[Cell(text=site), *(_cell(found.get((site, name))) for name in names)] for site in sites]
    total = [[found[site, name] for site in sites if (site, name) in found] for name in names]
    cells.append([Cell(text="heads beyond chance"), *(_count(own) for own in total)])
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
    detail = "" if found.chance is None else f"chance {number(found.chance)}"
    return Cell(text=number(found.value), value=found.value, detail=detail)


def _count(own: Sequence[Layer]) -> Cell:
    judged, beyond = sum(found.judged for found in own), sum(found.beyond for found in own)
    return Cell(text=f"{beyond} of {judged}", value=float(beyond)) if judged else Cell(text="no null tells")


def layer_rows(one: Shown, analysis: str) -> list[dict[str, object]]:
    """By layer, null by null: what the page's CSV files hold."""
    groups: dict[tuple[str, str, str | None], list[int]] = {}
    rows = one.table.select(analysis=analysis)
    for place, row in enumerate(rows):
        groups.setdefault((row.site, row.statistic, row.null), []).append(place)
    lines = []
    for (site, statistic, null), places in groups.items():
        own = [rows[place] for place in places]
        chance = [row.null_mean for row in own if row.null_mean is not None]
        head = {"run": one.name, "site": site, "statistic": statistic, "heads": len(own), "images": own[0].n}
        claims = sum(row.claim.startswith(("above", "below")) for row in own)
        kept = bool(own) and all(row.claim == KEPT for row in own)
        told = {"null": null, "null_mean": _rounded(chance), "heads_beyond": "" if kept else claims}
        lines.append({**head, "mean": _rounded([row.mean for row in own]), **told})
    return lines


def _rounded(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.5g}" if values else ""


def slug(name: str) -> str:
    """For names of files and anchors."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
