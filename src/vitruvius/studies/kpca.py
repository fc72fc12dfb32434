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
from vitruvius._style import LIGHT, LINES, figure_style, legend_below, series
from vitruvius.analysis import Table, analyse
from vitruvius.analysis.base import NULLS
from vitruvius.analysis.callback import read_rows
from vitruvius.analysis.shipped import read_shipped_folder
from vitruvius.analysis.table import layers_of
from vitruvius.report.analysis_figures import JOINT, Scale, axis_label, draw_norms_on, save_figures
from vitruvius.report.sections.analyses import layer_rows
from vitruvius.studies._base import Row, Subject, folder_of, names, panels, studies

ANALYSES = ("eigenvalues", "eigenvalues_by_rank", "norms", "gammas", "gammas:variant=released", "value_vectors")
HEADLINES = {  # analysis, statistic: the panels of the first figure
    ("value_vectors", "matched_cosine"): "values: matched cosine",
    ("value_vectors", "linear_cka"): "values: linear CKA",
    ("value_vectors", "kernel_cka"): "values: kernel CKA",
    ("norms", "log10_ratio"): "log₁₀(‖φ(q)‖² / ‖h‖²)",
    ("gammas", "relative"): "relative difference of gammas",
    ("eigenvalues", "max"): "largest eigenvalue",
}
STATISTICS = ("error", "h2", "phi2", "relative_to_h", "relative_to_phi")  # of `reconstruction`, over epochs


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
            subject,
            *analyses,
            images=subject.num_images,
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
    """One row per analysis and statistic: all heads of all layers together, each once whatever the number of nulls."""
    for analysis, statistic in dict.fromkeys((row.analysis, row.statistic) for row in table.rows):
        numbers = table.select(analysis=analysis, statistic=statistic)
        means = list({(row.site, row.head): row.mean for row in numbers}.values())
        layers = layers_of(numbers).values()
        known = [row for row in numbers if row.null_mean is not None]
        chance = {null: [row.null_mean or 0.0 for row in known if row.null == null] for null in NULLS}
        yield {
            "key": f"{analysis}/{statistic}",
            "analysis": analysis,
            "statistic": statistic,
            "mean": statistics.fmean(means),
            "std_over_heads": statistics.pstdev(means),
            "min": min(means),
            "max": max(means),
            **{f"chance_{null}": statistics.fmean(drawn) if drawn else None for null, drawn in chance.items()},
            "heads_beyond_chance": sum(layer.beyond for layer in layers),
            "heads_judged": sum(layer.judged for layer in layers),
            "heads": len(means),
            "images": numbers[0].n,
        }


def draw(rows: list[Row]) -> Figure:
    """The headlines of all `rows`, a panel each: mean over heads with their range, and the chance of each null."""
    models = names(rows)
    shown = {place: [row for row in rows if (row["analysis"], row["statistic"]) == place] for place in HEADLINES}
    shown = {place: own for place, own in shown.items() if own}
    with figure_style():
        size = (3.5, 0.7 + 0.34 * len(models))
        figure, every = panels([""] * max(len(shown), 1), 3, size, (0.0, 1.6), sharey=True)
        for axes, (place, own) in zip(every, shown.items(), strict=False):
            _draw_headline(axes, models, own)
            axes.set_title(HEADLINES[place], fontsize=10)
        legend_below(figure, columns=4)
    return figure


def _draw_headline(axes: Axes, models: Sequence[str], rows: Sequence[Row]) -> None:
    """Models down; a dot and a bar are what was observed, ticks are chance."""
    places = [models.index(row["model"]) for row in rows]
    low = [row["mean"] - row["min"] for row in rows]
    high = [row["max"] - row["mean"] for row in rows]
    means = [row["mean"] for row in rows]
    look: dict[str, Any] = {"fmt": "o", "color": series(0).colour, "linewidth": 1.6}
    axes.errorbar(means, places, xerr=[low, high], label="observed, range of heads", **look)
    for index, null in enumerate(NULLS, 1):
        known = [(row[f"chance_{null}"], place) for row, place in zip(rows, places, strict=True)]
        known = [(value, place) for value, place in known if value is not None]
        tick: dict[str, Any] = {"markersize": 13, "markeredgewidth": 2, "color": series(index).colour, "label": null}
        if known:
            axes.plot(*zip(*known, strict=True), "|", **tick)
    axes.set_yticks(range(len(models)), [Path(model).name for model in models])
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def further(rows: list[Row], folder: Path, settings: Mapping[str, Any]) -> Iterable[tuple[str, Figure]]:
    """Write layers.csv; draw the norms of all models, and the curves of reconstruction where there are some.

    `rows` are those of the study, `folder` is where it keeps its files, `settings` are those it was given.
    """
    tables = {model: Table.load(folder_of(folder, model)) for model in names(rows)}
    layers = []
    for model, analysis in [(model, name) for model, table in tables.items() for name in table.names("analysis")]:
        for row in layer_rows(model, tables[model], analysis):
            layers.append({"model": row.pop("run"), "analysis": analysis, **row})
    atomic_write_text(folder / "layers.csv", to_csv(layers))
    of_norms = {model: {c.statistic for c in table.curves if c.analysis == "norms"} for model, table in tables.items()}
    with_norms = {model: table for model, table in tables.items() if of_norms[model].issuperset(JOINT)}
    if with_norms:
        with figure_style():
            titles = [Path(model).name for model in with_norms]
            figure, every = panels(titles, 3, (3.6, 2.6), (0.8, 1.2), sharey=True)
            for axes, table in zip(every, with_norms.values(), strict=True):
                draw_norms_on(axes, table, "norms")
            legend_below(figure, columns=2 * min(3, len(titles)))
        yield "norms", figure
    lines = [*recorded_curves(tables), *published_curves(settings.get("shipped"))]
    if lines:
        yield "reconstruction", draw_reconstruction(lines)


class Curve(NamedTuple):
    """One curve of reconstruction over epochs."""

    model: str
    statistic: str
    batch: str
    epochs: list[int]  # counted from 1
    values: list[float]
    published: bool = False


def published_curves(folder: str | None) -> list[Curve]:
    """Those in the `folder` that the reproduction study publishes; none without one."""
    return [
        Curve(f"{model}, published", statistic, batch, [epoch + 1 for epoch in curve], list(curve.values()), True)
        for (model, statistic, batch), curve in (read_shipped_folder(folder) if folder is not None else {}).items()
    ]


def recorded_curves(models: Iterable[str]) -> list[Curve]:
    """What the runs among `models` have recorded of `reconstruction` while they trained."""
    found: dict[tuple[str, str, str], Curve] = {}
    for model in models:
        for row in read_rows(model) if Path(model).is_dir() else ():
            analysis, _, variant = str(row["analysis"]).partition(":")  # a run may have looked by several
            if analysis == "reconstruction":
                name = ", ".join(filter(None, (Path(model).name, variant)))
                place = (f"{model} {variant}", row["statistic"], row["batch"])
                curve = found.setdefault(place, Curve(name, row["statistic"], row["batch"], [], []))
                curve.epochs.append(int(row["epoch"]) + 1)
                curve.values.append(float(row["mean"]))
    return list(found.values())


def draw_reconstruction(curves: Sequence[Curve]) -> Figure:
    """Error and norms over epochs, and both relative errors, of `curves`: ours in colour, published ones in greys."""
    models = list(dict.fromkeys(curve.model for curve in curves))
    drawn = [statistic for statistic in STATISTICS if any(curve.statistic == statistic for curve in curves)]
    with figure_style():
        titles = [axis_label("reconstruction", statistic) for statistic in drawn]
        figure, every = panels(titles, 3, (3.6, 2.6), (0.8, 0.9))
        for axes, statistic in zip(every, drawn, strict=True):
            own = [curve for curve in curves if curve.statistic == statistic]
            scale = Scale.of([value for curve in own for value in curve.values])
            for curve in own:
                place = models.index(curve.model)
                look: dict[str, Any] = {"color": series(place).colour, "linewidth": 1.6}
                if curve.published:
                    look = {"color": (LIGHT["quiet"], LIGHT["ink"])[place % 2], "linewidth": 1.1}
                look["linestyle"] = LINES[curve.batch != "train"]
                axes.plot(curve.epochs, scale(curve.values), label=f"{curve.model}, {curve.batch}", **look)
            scale.label(axes)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        legend_below(figure, columns=min(3, len(drawn)))
    return figure


kpca.draw = draw
kpca.further = further
