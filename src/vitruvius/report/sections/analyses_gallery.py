"""The gallery of an analysis: which figures there are of a table, to put on the page or to keep as files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vitruvius.analysis import Table
from vitruvius.report.explanations import draw_pictures
from vitruvius.report.sections.analyses_curves import draw_curves, draw_map
from vitruvius.report.sections.analyses_figures import Shown, alone, draw_bands, draw_heads, draw_histogram
from vitruvius.report.sections.analyses_norms import JOINT, draw_norms
from vitruvius.report.style import save_figure

MOST = 3  # statistics of an analysis that are drawn; the tables hold more, the files all
MODEL = "model"
CURVES = {
    ("eigenvalues", "spectrum"): "rank of the eigenvalue",
    ("gammas", "relative_by_column"): "column of V",
    ("gammas", "absolute_by_column"): "column of V",
    ("gammas", "alignment_by_column"): "column of V",
}
HISTOGRAMS = (("value_vectors", "matched_cosine"), ("value_vectors", "linear_cka_debiased"), ("norms", "log10_ratio"))
BANDS = (("norms", "error"), ("norms", "relative_to_h"), ("norms", "relative_to_phi"))  # beyond the first ones
HEAT_MAPS = (("value_vectors", "linear_cka"), ("value_vectors", "linear_cka_debiased"))


def save_figures(table: Table, folder: Path) -> list[Path]:
    """Every figure of a `table` as PNG and PDF in `figures` below `folder`."""
    return [path for name, figure in figures(table) for path in save_figure(figure, folder / "figures" / name)]


def figures(table: Table) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of a `table`, each to stand alone."""
    for analysis in table.names("analysis"):
        name = re.sub(r"[^\w.-]+", "-", analysis)
        for statistic in statistics_of(table, analysis)[:MOST]:
            if not of_model(table, analysis):
                yield f"{name}-{statistic}", draw_bands(alone(table), analysis, statistic, legend=True)
        for stem, figure in further(alone(table), analysis, legend=True):
            yield f"{name}-{stem}", figure


def further(shown: Sequence[Shown], analysis: str, *, legend: bool) -> Iterator[tuple[str, Figure]]:
    """Further bands and histograms for all runs together; curves and heat maps where there is one run.

    `shown` are runs with their tables; `analysis` is drawn; `legend` adds one to each figure. Yields names and figures.
    """
    tables = [one.table for one in shown]
    for statistic in _statistics_in(BANDS, analysis, tables):
        yield statistic, draw_bands(shown, analysis, statistic, legend=legend)
    for statistic in _statistics_in(HISTOGRAMS, analysis, tables):
        yield f"histogram-{statistic}", draw_histogram(shown, analysis, statistic, legend=legend)
    if len(shown) == 1:
        yield from _of_one_run(shown[0].table, analysis, legend=legend)


def _of_one_run(table: Table, analysis: str, *, legend: bool) -> Iterator[tuple[str, Figure]]:
    """Curves, the joint norms, heat maps of heads, the map of rollout, and the pictures of an explanation."""
    known = {curve.statistic for curve in table.curves if curve.analysis == analysis}
    for statistic in _named_in(CURVES, analysis):
        if statistic in known:
            xlabel = CURVES[_plain(analysis), statistic]
            yield statistic, draw_curves(table, analysis, statistic, xlabel=xlabel, legend=legend)
    for statistic in _statistics_in(HEAT_MAPS, analysis, [table]):
        yield f"heads-{statistic}", draw_heads(table, analysis, statistic)
    yield from _whole_figures(table, analysis, known, legend=legend)


def _whole_figures(table: Table, analysis: str, known: set[str], *, legend: bool) -> Iterator[tuple[str, Figure]]:
    """Figures that are not of one statistic; `known` are the curves there are."""
    if set(JOINT) <= known:
        yield "joint", draw_norms(table, analysis, legend=legend)
    if _plain(analysis) == "rollout" and "map" in known:
        yield "map", draw_map(table, analysis)
    if analysis in table.pictures:
        yield "pictures", draw_pictures(table.pictures[analysis])


def _statistics_in(pairs: Iterable[tuple[str, str]], analysis: str, tables: Sequence[Table]) -> list[str]:
    """Those of the pairs that every table has rows of."""
    return [statistic for statistic in _named_in(pairs, analysis) if _all_have(tables, analysis, statistic)]


def _named_in(pairs: Iterable[tuple[str, str]], analysis: str) -> list[str]:
    return [statistic for name, statistic in pairs if name == _plain(analysis)]


def _all_have(tables: Sequence[Table], analysis: str, statistic: str) -> bool:
    return all(table.select(analysis=analysis, statistic=statistic) for table in tables)


def _plain(analysis: str) -> str:
    """An analysis without its settings: gammas of gammas:variant=released."""
    return analysis.partition(":")[0]


def statistics_of(table: Table, analysis: str) -> list[str]:
    """In the order in which the analysis gives them: what matters most first.

    `table` holds the `analysis`.
    """
    return list(dict.fromkeys(row.statistic for row in table.select(analysis=analysis)))


def of_model(table: Table, analysis: str) -> bool:
    """Whether it belongs to no single site. `table` holds the `analysis`."""
    return all(row.site == MODEL for row in table.select(analysis=analysis))
