"""Is attention kernel PCA? The tables and figures of the reproduction study (arXiv:2505.07908) for any models.

Eigenvalues, norms, gammas and value vectors of every head, with chance beside every number. `table.csv` has a line per
model and statistic, `layers.csv` one per layer and null; the folder of each model holds the heads and its figures.
`shipped` names the study's folder wandb_data, whose curves are drawn beside those of runs that trained with the
analysis `reconstruction`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitruvius._files import atomic_write_text
from vitruvius._notebook import to_csv
from vitruvius.analysis import NULLS, Table, analyse, read_rows
from vitruvius.analysis import Row as Number
from vitruvius.analysis.shipped import ShippedRun, read_shipped_folder
from vitruvius.analysis.table import layers_of
from vitruvius.report.analysis_figures import JOINT, Scale, draw_norms_on, save_figures
from vitruvius.report.sections.analyses import layer_rows
from vitruvius.report.style import LIGHT, LINES, figure_style, legend_below, series
from vitruvius.report.words import axis_label
from vitruvius.studies._base import Row, Subject, folder_of, studies

ANALYSES = ("eigenvalues", "eigenvalues_by_rank", "norms", "gammas", "gammas:variant=released", "value_vectors")
HEADLINES = {  # analysis, statistic: the panels of the first figure
    ("value_vectors", "matched_cosine"): "values: matched cosine",
    ("value_vectors", "linear_cka"): "values: linear CKA",
    ("value_vectors", "kernel_cka"): "values: kernel CKA",
    ("norms", "log10_ratio"): "log₁₀(‖φ(q)‖² / ‖h‖²)",
    ("gammas", "relative"): "relative difference of gammas",
    ("eigenvalues", "max"): "largest eigenvalue",
}
CURVES = ("error", "h2", "phi2", "relative_to_h", "relative_to_phi")  # of `reconstruction`, over epochs


@studies.register("kpca")
def kpca(
    subject: Subject,
    done: set[str],
    *,
    analyses: tuple[str, ...] = ANALYSES,
    shipped: str | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """Eigenvalues, norms, gammas and value vectors of several models, chance beside every number.

    subject and done: as for every study.
    analyses: which ones, as in `vitruvius analyse`.
    shipped: the folder of curves that the reproduction study publishes, to be drawn beside those of runs; none.
    seed: of chance.
    """
    if shipped is not None:
        read_shipped_folder(shipped)  # what is wrong with it is said before hours are spent
    if done:
        table = Table.load(subject.folder)
    else:
        table = analyse(
            subject.model,
            list(subject.batches()),
            *analyses,
            images=len(subject.y),
            seed=seed,
            progress=subject.progress,
            facts={"model": subject.name},
        )
        table.save(subject.folder)
        save_figures(table, subject.folder)
    for row in _summary(table):
        if row["key"] not in done:
            yield row


kpca.images = 100
kpca.labels = False


def _summary(table: Table) -> Iterator[Row]:
    """One row per analysis and statistic: all heads of all layers together."""
    for analysis in table.names("analysis"):
        for statistic in dict.fromkeys(row.statistic for row in table.select(analysis=analysis)):
            key = {"key": f"{analysis}/{statistic}", "analysis": analysis, "statistic": statistic}
            yield {**key, **_over_heads(table.select(analysis=analysis, statistic=statistic))}


def _over_heads(numbers: Sequence[Number]) -> Row:
    """What the rows of one statistic say, all heads of all layers together."""
    layers = layers_of(numbers).values()
    means = [row.mean for row in _once(numbers)]
    return {
        "mean": statistics.fmean(means),
        "std_over_heads": statistics.pstdev(means),
        "min": min(means),
        "max": max(means),
        **{f"chance_{null}": _chance(numbers, null) for null in NULLS},
        "heads_beyond_chance": sum(layer.beyond for layer in layers),
        "heads_judged": sum(layer.judged for layer in layers),
        "heads": len(means),
        "images": numbers[0].n,
    }


def _once(numbers: Sequence[Number]) -> list[Number]:
    """Each head once, whatever the number of nulls."""
    found = {(row.site, row.head): row for row in numbers}
    return list(found.values())


def _chance(numbers: Sequence[Number], null: str) -> float | None:
    values = [row.null_mean for row in numbers if row.null == null and row.null_mean is not None]
    if values:
        return statistics.fmean(values)
    return None


def draw(rows: list[Row]) -> Figure:
    """The headlines of all `rows`, a panel each: mean over heads with their range, and the chance of each null."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    shown = [place for place in HEADLINES if _rows_of(rows, *place)]
    with figure_style():
        figure = Figure(figsize=(10.5, 1.6 + 2 * (0.7 + 0.34 * len(models))), layout="constrained")
        panels = figure.subplots(2, 3, squeeze=False, sharey=True).flatten()  # the names of models stand once per row
        for axes, place in zip(panels, shown, strict=False):
            _draw_headline(axes, models, _rows_of(rows, *place))
            axes.set_title(HEADLINES[place], fontsize=10)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        legend_below(figure, columns=4)
    return figure


def _shipped_runs(settings: Mapping[str, Any]) -> list[ShippedRun]:
    if settings.get("shipped") is None:
        return []
    return read_shipped_folder(settings["shipped"])


def _rows_of(rows: Sequence[Row], analysis: str, statistic: str) -> list[Row]:
    return [row for row in rows if (row["analysis"], row["statistic"]) == (analysis, statistic)]


def _draw_headline(axes: Axes, models: Sequence[str], rows: Sequence[Row]) -> None:
    """Models down; a dot and a bar are what was observed, ticks are chance."""
    places = [models.index(row["model"]) for row in rows]
    low = [row["mean"] - row["min"] for row in rows]
    high = [row["max"] - row["mean"] for row in rows]
    means = [row["mean"] for row in rows]
    look: dict[str, Any] = {"fmt": "o", "color": series(0).colour, "linewidth": 1.6}
    axes.errorbar(means, places, xerr=[low, high], label="observed, range of heads", **look)
    for index, null in enumerate(NULLS):
        chance = [(row[f"chance_{null}"], place) for row, place in zip(rows, places, strict=True)]
        _draw_chance(axes, chance, colour=series(index + 1).colour, label=null)
    axes.set_yticks(range(len(models)), [Path(model).name for model in models])
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _draw_chance(axes: Axes, chance: Sequence[tuple[float | None, int]], *, colour: str, label: str) -> None:
    known = [(value, place) for value, place in chance if value is not None]
    if known:
        values, places = zip(*known, strict=True)
        axes.plot(values, places, "|", markersize=13, markeredgewidth=2, color=colour, label=label)


def further(rows: list[Row], folder: Path, settings: Mapping[str, Any]) -> Iterable[tuple[str, Figure]]:
    """Write layers.csv; draw the norms of all models, and the curves of reconstruction where there are some.

    `rows` are those of the study, `folder` is where it keeps its files, `settings` are those it was given.
    """
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    tables = {model: Table.load(folder_of(folder, model)) for model in models}
    atomic_write_text(folder / "layers.csv", to_csv(_layers(tables)))
    with_norms = {model: table for model, table in tables.items() if _has_norms(table)}
    if with_norms:
        yield "norms", draw_all_norms(with_norms)
    lines = [*_own_lines(models), *_published_lines(_shipped_runs(settings))]
    if lines:
        yield "reconstruction", draw_reconstruction(lines)


def _layers(tables: Mapping[str, Table]) -> list[dict[str, object]]:
    """Every layer, statistic and null of every model."""
    rows = []
    for model, table in tables.items():
        for analysis in table.names("analysis"):
            for row in layer_rows(model, table, analysis):
                named = {"model": row.pop("run"), "analysis": analysis}
                rows.append({**named, **row})
    return rows


def _has_norms(table: Table) -> bool:
    return set(JOINT) <= {curve.statistic for curve in table.curves if curve.analysis == "norms"}


def draw_all_norms(tables: Mapping[str, Table]) -> Figure:
    """‖φ(q)‖² and ‖h‖² over layers, a panel per model of `tables`, all on one scale."""
    columns = min(3, len(tables))
    lines = -(-len(tables) // columns)
    with figure_style():
        figure = Figure(figsize=(0.8 + 3.6 * columns, 1.2 + 2.6 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
        for axes, (model, table) in zip(panels, tables.items(), strict=False):
            draw_norms_on(axes, table, "norms")
            axes.set_title(Path(model).name)
        for axes in panels[len(tables) :]:
            axes.set_visible(False)
        legend_below(figure, columns=2 * columns)
    return figure


class _Line(NamedTuple):
    """One curve of reconstruction over epochs."""

    model: str
    statistic: str
    batch: str
    epochs: list[int]  # counted from 1
    values: list[float]
    published: bool


def _published_lines(shipped: Sequence[ShippedRun]) -> list[_Line]:
    return [
        _Line(f"{run.model}, published", statistic, batch, [epoch + 1 for epoch in curve.epochs], curve.values, True)
        for run in shipped
        for (statistic, batch), curve in run.curves.items()
    ]


def _own_lines(models: Sequence[str]) -> list[_Line]:
    """What runs have recorded of `reconstruction` while they trained."""
    found: dict[tuple[str, str, str], _Line] = {}
    for model in models:
        for row in _recorded(model):
            _, _, variant = str(row["analysis"]).partition(":")  # a run may have looked by several
            name = ", ".join(filter(None, (Path(model).name, variant)))
            place = (f"{model} {variant}", row["statistic"], row["batch"])
            line = found.setdefault(place, _Line(name, row["statistic"], row["batch"], [], [], False))
            line.epochs.append(int(row["epoch"]) + 1)
            line.values.append(float(row["mean"]))
    return list(found.values())


def _recorded(model: str) -> list[dict[str, Any]]:
    if not Path(model).is_dir():
        return []
    return [row for row in read_rows(model) if str(row["analysis"]).partition(":")[0] == "reconstruction"]


def draw_reconstruction(lines: Sequence[_Line]) -> Figure:
    """Error and norms over epochs, and both relative errors, of `lines`: ours in colour, published ones in greys."""
    drawn = [statistic for statistic in CURVES if any(line.statistic == statistic for line in lines)]
    with figure_style():
        figure = Figure(figsize=(0.8 + 3.6 * min(3, len(drawn)), 0.9 + 2.6 * -(-len(drawn) // 3)), layout="constrained")
        panels = figure.subplots(-(-len(drawn) // 3), min(3, len(drawn)), squeeze=False).flatten()
        for axes, statistic in zip(panels, drawn, strict=False):
            _draw_statistic(axes, [line for line in lines if line.statistic == statistic], lines)
            axes.set_title(axis_label("reconstruction", statistic))
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        for axes in panels[len(drawn) :]:
            axes.set_visible(False)
        legend_below(figure, columns=min(3, len(drawn)))
    return figure


def _draw_statistic(axes: Axes, own: Sequence[_Line], every: Sequence[_Line]) -> None:
    models = list(dict.fromkeys(line.model for line in every))
    scale = Scale.of([value for line in own for value in line.values])
    for line in own:
        look: dict[str, Any] = {"linestyle": LINES[line.batch != "train"], "linewidth": 1.6}
        if line.published:
            look |= {"color": (LIGHT["quiet"], LIGHT["ink"])[models.index(line.model) % 2], "linewidth": 1.1}
        else:
            look["color"] = series(models.index(line.model)).colour
        axes.plot(line.epochs, scale(line.values), label=f"{line.model}, {line.batch}", **look)
    scale.label(axes)


kpca.draw = draw
kpca.further = further
