"""Inside attention: what each analysis found by layer, with chance beside it; and over training, after epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from vitruvius._errors import VitruviusError
from vitruvius._registry import first_line
from vitruvius._style import LINES, series
from vitruvius.analysis import Table, explanations
from vitruvius.analysis import analyses as registry
from vitruvius.analysis.callback import read_rows
from vitruvius.analysis.table import SAME_BY_CONSTRUCTION, Row, count_beyond, layers_of, number
from vitruvius.report.analysis_figures import (
    DASHES,
    MOST,
    Shown,
    band_statistics,
    draw_bands,
    draw_training,
    further_figures,
    heading,
    telling_nulls,
    words,
)
from vitruvius.report.blocks import Block, Cell, Drawing, Fold, Html, Key, Note, run_keys, section
from vitruvius.report.blocks import Table as PageTable
from vitruvius.report.run import Run

EXPLAINED = (
    "Lines are means over heads, bands reach from the lowest to the highest head. Dashed lines are chance: heads of "
    "the same size filled with independent normal numbers (gaussian), turned at random with their singular values kept "
    "(spectrum), or with tokens shuffled (permuted); nulls that cannot change a number are not drawn. A head lies "
    "beyond chance when it lies on the same side of every null by Welch's test at 99.9 %. Histograms count heads; "
    "their outermost bins hold all that lies beyond."
)
MOST_OVER_TRAINING = 6  # statistics of an analysis that are drawn over epochs


@section("analyses", title="Inside attention", order=55)
def analyses(runs: Sequence[Run]) -> Sequence[Block]:
    """Every analysis of every run that has some."""
    shown, notes = _read(runs)
    if not shown:
        return notes
    keys = run_keys([run for run in runs if run.name in {one.name for one in shown}])
    facts = [(one.name, one.table.facts) for one in shown]
    told = [f"{name}: {f.get('images')} images of {f.get('data')}, seed {f.get('seed')}" for name, f in facts]
    blocks: list[Block] = [Note(text=f"{'; '.join(told)}."), Note(text=EXPLAINED)]
    for analysis in dict.fromkeys(name for one in shown for name in one.table.names("analysis")):
        blocks += _analysis([one for one in shown if one.table.select(analysis=analysis)], analysis, keys)
    return [*blocks, *notes]


def _read(runs: Sequence[Run]) -> tuple[list[Shown], list[Note]]:
    """The tables that there are, and remarks about them and about those that cannot be read."""
    shown: list[Shown] = []
    notes: list[Note] = []
    for run in runs:
        places = [run.folder / "analysis", run.folder]  # the latter of `vitruvius analyse --out`
        folder = next((place for place in places if (place / "table.json").is_file()), None)
        try:
            table = None if folder is None else Table.load(folder)
        except VitruviusError as error:
            notes.append(Note(text=f"{run.name}: {error}"))
            continue
        if table is not None:
            shown.append(Shown(run.name, run.look, table))
            notes += [Note(text=f"{run.name}: {remark}") for remark in table.remarks]
    return shown, notes


def _analysis(shown: Sequence[Shown], name: str, keys: list[Key]) -> list[Block]:
    """The figures of one analysis together, and a table for each run."""
    title = Markup('<h3 style="margin-top: 2.5rem">{} <small>{}</small></h3>').format(heading(name), name)
    drawn = band_statistics(shown[0].table, name)
    figures = [(words(statistic), draw_bands(shown, name, statistic)) for statistic in drawn]
    figures += further_figures(shown, name, legend=False)
    caption = next(
        (first_line(r[n]).replace("`", "") for r in (registry, explanations) if (n := name.partition(":")[0]) in r), ""
    )
    picture: Block = Note(text=caption)
    if figures:
        runs = ", ".join(one.name for one in shown)
        rows = [row for one in shown for row in one.table.select(analysis=name)]
        telling = telling_nulls([row for row in rows if row.statistic in drawn])
        picture = Drawing(
            name=f"analysis-{slug(name)}",
            panels=[(f, f"{name}: {what} by layer for {runs}; the numbers are in the table.") for what, f in figures],
            caption=caption,
            rows=[row for one in shown for row in layer_rows(one.name, one.table, name)],
            legend=[*keys, *(Key.of_line(null, DASHES[null]) for null in telling)],
        )
    tables = [Fold(title=f"{heading(name)} by layer: {one.name}", inside=[_layer_table(one, name)]) for one in shown]
    return [Html(markup=title), picture, *tables]


def _layer_table(one: Shown, analysis: str) -> PageTable:
    """Sites down, the first statistics across; below each number the nearest null."""
    rows = one.table.select(analysis=analysis)
    names = list(dict.fromkeys(row.statistic for row in rows))[: 2 * MOST]
    layers = layers_of(rows)
    cells = []
    for site in dict.fromkeys(site for site, _ in layers):
        cells.append([Cell(text=site)])
        for layer in (layers.get((site, name)) for name in names):
            detail = "" if layer is None or layer.chance is None else f"chance {number(layer.chance)}"
            value = None if layer is None else layer.value
            cells[-1].append(Cell(text=number(value), value=value, detail=detail))
    cells.append([Cell(text="heads beyond chance")])
    for name in names:
        own = [layer for key, layer in layers.items() if key[1] == name]
        beyond = float(sum(layer.beyond for layer in own)) if any(layer.judged for layer in own) else None
        cells[-1].append(Cell(text=count_beyond(own), value=beyond))
    return PageTable(
        name=f"{slug(analysis)}-{slug(one.name)}",
        titles=["site", *map(words, names)],
        cells=cells,
        rows=layer_rows(one.name, one.table, analysis),
        caption="Mean over heads and images; below it the nearest null.",
    )


def layer_rows(run: str, table: Table, analysis: str) -> list[dict[str, object]]:
    """By layer, null by null: what the page's CSV files hold."""
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in table.select(analysis=analysis):
        groups.setdefault((row.site, row.statistic, row.null), []).append(row)
    rows: list[dict[str, object]] = []
    for (site, statistic, null), heads in groups.items():
        chance = [row.null_mean for row in heads if row.null_mean is not None]
        cannot_tell = all(row.claim == SAME_BY_CONSTRUCTION for row in heads)
        beyond = sum(row.claim.startswith(("above", "below")) for row in heads)
        place = {"run": run, "site": site, "statistic": statistic, "heads": len(heads), "images": heads[0].n}
        observed = {"mean": _mean_text([row.mean for row in heads])}
        drawn = {"null": null, "null_mean": _mean_text(chance), "heads_beyond": "" if cannot_tell else beyond}
        rows.append({**place, **observed, **drawn})
    return rows


def _mean_text(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.5g}" if values else ""


def slug(name: str) -> str:
    """A name in letters, digits and hyphens, for files and anchors."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


@section("analyses_training", title="Inside attention over training", order=22)
def analyses_training(runs: Sequence[Run]) -> Sequence[Block]:
    """The analyses that ran after epochs, on fixed images: one group of panels for each run and analysis."""
    blocks: list[Block] = []
    for run in runs:
        rows = read_rows(run.folder)
        for analysis in dict.fromkeys(str(row["analysis"]) for row in rows):
            blocks.append(_over_training(run, analysis, [row for row in rows if row["analysis"] == analysis]))
    return blocks


def _over_training(run: Run, analysis: str, rows: list[dict[str, Any]]) -> Drawing:
    panels = []
    for statistic in list(dict.fromkeys(str(row["statistic"]) for row in rows))[:MOST_OVER_TRAINING]:
        alt = f"{words(statistic)} over epochs of {run.name}; the numbers are in the table."
        panels.append((draw_training(rows, analysis, [statistic], title=words(statistic)), alt))
    numbers = [{key: value for key, value in row.items() if key != "by_site"} for row in rows]
    batches = dict.fromkeys(str(row["batch"]) for row in rows)
    return Drawing(
        name=f"training-{run.index}-{slug(analysis)}",
        panels=panels,
        caption=f"{run.name}: {heading(analysis)}, mean over layers, heads and the same images after every epoch.",
        rows=[{"run": run.name, **row, "epoch": row["epoch"] + 1} for row in numbers],
        legend=[Key.of_line(batch, LINES[i % len(LINES)], series(0).name) for i, batch in enumerate(batches)],
    )
