"""Inside attention: what each analysis found by layer, with chance beside it, as figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from vitruvius._errors import VitruviusError
from vitruvius._registry import first_line
from vitruvius.analysis import NULLS, Table, explanations
from vitruvius.analysis import analyses as analyses_registry
from vitruvius.report._blocks import Block, Drawing, Fold, Html, Key, Note
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import run_keys
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.sections.analyses_figures import DASHES, Shown, draw_bands, telling_nulls
from vitruvius.report.sections.analyses_gallery import MOST, further, of_model, statistics_of
from vitruvius.report.sections.analyses_tables import layer_rows, layer_table, slug
from vitruvius.report.sections.analyses_words import heading, words

EXPLAINED = (
    "Lines are means over heads, bands reach from the lowest to the highest head. Dashed lines are chance: heads of "
    "the same size filled with independent normal numbers (gaussian), turned at random with their singular values kept "
    "(spectrum), or with tokens shuffled (permuted); nulls that cannot change a number are not drawn. A head lies "
    "beyond chance when it lies on the same side of every null by Welch's test at 99.9 %. Histograms count heads; "
    "their outermost bins hold all that lies beyond."
)


@section("analyses", title="Inside attention", order=55)
def analyses(runs: Sequence[Run]) -> Sequence[Block]:
    """Every analysis of every run that has some. `runs` are those of the page."""
    shown, notes = _read(runs)
    if not shown:
        return notes
    names = {one.name for one in shown}
    keys = run_keys([run for run in runs if run.name in names])
    blocks: list[Block] = [Note(text=_told(shown)), Note(text=EXPLAINED)]
    for analysis in _asked(shown):
        blocks += _analysis(shown, analysis, keys)
    return [*blocks, *notes]


def _asked(shown: Sequence[Shown]) -> list[str]:
    """The analyses of all runs, in order of appearance."""
    return list(dict.fromkeys(name for one in shown for name in one.table.names("analysis")))


def read_analysis(folder: Path) -> Table | None:
    """The table of a run folder, or of a folder that `vitruvius analyse --out` wrote; None if there is none.

    `folder` is that folder.
    """
    places = [place for place in (folder / "analysis", folder) if (place / "table.json").is_file()]
    if places:
        return Table.load(places[0])
    return None


def _read(runs: Sequence[Run]) -> tuple[list[Shown], list[Note]]:
    """The tables that there are, and remarks about them and about those that cannot be read."""
    shown: list[Shown] = []
    notes: list[Note] = []
    for run in runs:
        try:
            table = read_analysis(run.folder)
        except VitruviusError as error:
            notes.append(Note(text=f"{run.name}: {error}"))
            continue
        if table is not None:
            shown.append(Shown(name=run.name, look=run.look, table=table))
            notes += [Note(text=f"{run.name}: {remark}") for remark in table.remarks]
    return shown, notes


def _analysis(shown: Sequence[Shown], name: str, keys: list[Key]) -> list[Block]:
    own = [one for one in shown if one.table.select(analysis=name)]
    named = f"{escape(heading(name))} <small>{escape(name)}</small>"
    title = Html(markup=Markup(f'<h3 style="margin-top: 2.5rem">{named}</h3>'))
    drawn = _drawn(own[0].table, name)
    panels = [(words(statistic), draw_bands(own, name, statistic)) for statistic in drawn]
    panels += further(own, name, legend=False)
    picture: Block = Note(text=_caption(name))
    if panels:
        picture = Drawing(
            name=f"analysis-{slug(name)}",
            panels=_svgs(own, name, panels),
            caption=_caption(name),
            rows=[row for one in own for row in layer_rows(one, name)],
            legend=[*keys, *_null_keys(own, name, drawn)],
        )
    tables = [Fold(title=f"{heading(name)} by layer: {one.name}", inside=[layer_table(one, name)]) for one in own]
    return [title, picture, *tables]


def _drawn(table: Table, name: str) -> list[str]:
    """The statistics that get a panel over layers; an analysis of the whole model has none."""
    if of_model(table, name):
        return []
    return statistics_of(table, name)[:MOST]


def _svgs(own: Sequence[Shown], name: str, panels: Sequence[tuple[str, Figure]]) -> list[Markup]:
    svgs = []
    for place, (stem, figure) in enumerate(panels):
        svgs.append(inline_svg(figure, name=f"analysis-{slug(name)}-{place}", alt=_alt(own, name, stem)))
    return svgs


def _null_keys(shown: Sequence[Shown], analysis: str, statistics: Sequence[str]) -> list[Key]:
    rows = [row for one in shown for row in one.table.select(analysis=analysis) if row.statistic in statistics]
    told = telling_nulls(rows)
    return [Key(text=n, dashes=" ".join(f"{1.8 * s:g}" for s in DASHES[n][1])) for n in NULLS if n in told]


def _told(shown: Sequence[Shown]) -> str:
    parts = [
        f"{one.name}: {one.table.facts.get('images')} images of {one.table.facts.get('data')}, "
        f"seed {one.table.facts.get('seed')}"
        for one in shown
    ]
    return "; ".join(parts) + "."


def _caption(analysis: str) -> str:
    name = analysis.partition(":")[0]
    for registry in (analyses_registry, explanations):
        if name in registry:
            return first_line(registry[name]).replace("`", "")
    return ""


def _alt(shown: Sequence[Shown], analysis: str, what: str) -> str:
    return (
        f"{analysis}: {what} by layer for " + ", ".join(one.name for one in shown) + "; the numbers are in the table."
    )
