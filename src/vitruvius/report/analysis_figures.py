"""Figures of analyses: over layers, heads, ranks and epochs, chance beside each; to put on a page or to keep as files.

Layers are the sites of a model in order; nulls are dashed. H heads, K positions of a curve
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius._style import (
    LIGHT,
    LINES,
    Series,
    figure_style,
    heat,
    in_whole_numbers,
    legend_below,
    new_axes,
    outlier_proof,
    save_figure,
    series,
)
from vitruvius.analysis.base import NULLS
from vitruvius.analysis.explanations import Explanation, explain
from vitruvius.analysis.norms import QUANTILES
from vitruvius.analysis.table import SAME_BY_CONSTRUCTION, Pictures, Row, Table, by_site

DASHES = dict(zip(NULLS, LINES[1:], strict=False))
MOST = 3  # statistics of an analysis that are drawn; the tables hold more, the files all
MODEL = "model"  # the site of statistics that belong to no single one
CURVES = {  # further figures of some statistics; of curves, with the label of their axis
    ("eigenvalues", "spectrum"): "rank of the eigenvalue",
    ("gammas", "relative_by_column"): "column of V",
    ("gammas", "absolute_by_column"): "column of V",
    ("gammas", "alignment_by_column"): "column of V",
}
HISTOGRAMS = (("value_vectors", "matched_cosine"), ("value_vectors", "linear_cka_debiased"), ("norms", "log10_ratio"))
BANDS = (("norms", "error"), ("norms", "relative_to_h"), ("norms", "relative_to_phi"))  # beyond the first ones
HEAT_MAPS = (("value_vectors", "linear_cka"), ("value_vectors", "linear_cka_debiased"))
JOINT = ("log10_phi2_quantiles", "log10_h2_quantiles")
LOWEST, LOW, MEDIAN, HIGH, HIGHEST = range(len(QUANTILES))
HEADINGS = {
    "attention_gradient": "Attention times gradient, last layer",
    "distance": "Distance of attention",
    "effective_rank": "Effective rank",
    "eigenvalues": "Eigenvalues of the kernel of the keys",
    "eigenvalues_by_rank": "Eigenvalues by rank, as published",
    "entropy": "Entropy of attention",
    "gammas": "Are values principal components? Constancy of gamma",
    "head_similarity": "Similarity of heads",
    "integrated_gradients": "Integrated gradients",
    "norms": "Norms of queries and outputs",
    "reconstruction": "Reconstruction error",
    "relevance": "Relevance",
    "rollout": "Attention rollout",
    "token_norms": "Norms of tokens, and sinks",
    "value_vectors": "Values against kernel PCA's prediction",
}
LABELS = {  # analysis.statistic → label of its axis; a name without one is written as it is
    "distance.patches": "mean distance (patches)",
    "distance.relative": "distance / that of even attention",
    "distance.neighbours": "weight on the 3 × 3 around (share)",
    **{f"effective_rank.{of}": "effective rank (dimensions)" for of in ("keys", "queries", "values", "output")},
    **{f"eigenvalues.{name}": "eigenvalue" for name in ("max", "min", "mean", "median", "spectrum")},
    **{f"eigenvalues_by_rank.{name}": "eigenvalue" for name in ("max", "min", "mean", "median")},
    "eigenvalues.first_share": "first eigenvalue / trace",
    "entropy.relative": "entropy / largest possible",
    "entropy.nats": "entropy (nats)",
    "entropy.effective_keys": "effective number of keys",
    "entropy.largest_weight": "largest weight (share)",
    "gammas.alignment": "|cos(K a, a)|",
    "gammas.relative": "relative difference between tokens",
    "gammas.relative_std": "deviation of the relative difference",
    "gammas.absolute": "difference between tokens",
    "gammas.absolute_std": "deviation of the difference",
    "head_similarity.maps": "cosine of attention maps",
    "head_similarity.outputs": "linear CKA of outputs",
    "norms.log10_ratio": "log₁₀(‖φ(q)‖² / ‖h‖²)",
    "norms.phi2": "‖φ(q)‖², mean over tokens",
    "norms.h2": "‖h‖², mean over tokens",
    "norms.phi2_median": "‖φ(q)‖², median over tokens",
    "norms.h2_median": "‖h‖², median over tokens",
    "reconstruction.error": "|‖φ(q)‖² − ‖h‖²|",
    "reconstruction.relative_to_h": "error / ‖h‖²",
    "reconstruction.relative_to_phi": "error / ‖φ(q)‖²",
    "reconstruction.signed_error": "‖φ(q)‖² − ‖h‖²",
    "rollout.relative_entropy": "entropy / largest possible",
    "rollout.effective_patches": "effective number of patches",
    "rollout.largest_share": "largest share of a patch",
    "rollout.prefix": "share of the prefix tokens",
    "token_norms.sink": "weight on the strongest sink (share)",
    **{f"token_norms.{name}_peak": "largest norm / median" for name in ("key", "value", "output")},
    **{f"token_norms.{name}": "norm (mean over tokens)" for name in ("key", "value", "output")},
    "token_norms.outliers": "outlying tokens (share)",
    "value_vectors.matched_cosine": "cosine after matching",
    "value_vectors.linear_cka": "linear CKA",
    "value_vectors.linear_cka_debiased": "linear CKA, debiased",
    "value_vectors.subspace_overlap": "overlap of subspaces (share)",
    "value_vectors.procrustes": "cosine after the best rotation",
    "value_vectors.principal_angle": "mean principal angle (degrees)",
    "value_vectors.cosine": "cosine",
}


@dataclass(frozen=True)
class Scale:
    """Plain, or in powers of ten where positive numbers span more than two of them; up to the limits of float64."""

    powers: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """The scale that suits these values."""
        return cls(bool(values) and min(values) > 0 and max(values) / 100 > min(values))

    def __call__(self, values: Sequence[float]) -> list[float]:
        """Where to draw them; on a scale of powers only positive values have a place."""
        return [math.log10(v) if v > 0 else math.nan for v in values] if self.powers else list(values)

    def label(self, axes: Axes) -> None:
        """Ticks that show the numbers."""
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=self.powers))
        if self.powers:
            axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))


def _power_of_ten(power: float, _: object = None) -> str:
    """10⁻³, as a tick says the power −3."""
    return "10" + f"{power:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True)
class Shown:
    """A table on the page, and how its lines look."""

    name: str
    look: Series
    table: Table


def alone(table: Table) -> list[Shown]:
    """One table, as the only one."""
    return [Shown(name=str(table.facts.get("model", "model")), look=series(0), table=table)]


def save_figures(table: Table, folder: Path) -> list[Path]:
    """Every figure of a table as PNG and PDF in `figures` below `folder`."""
    return [path for name, figure in figures(table) for path in save_figure(figure, folder / "figures" / name)]


def figures(table: Table) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of a table, each to stand alone."""
    for analysis in table.names("analysis"):
        name = re.sub(r"[^\w.-]+", "-", analysis)
        for statistic in band_statistics(table, analysis):
            yield f"{name}-{statistic}", draw_bands(alone(table), analysis, statistic, legend=True)
        for stem, figure in further_figures(alone(table), analysis, legend=True):
            yield f"{name}-{stem}", figure


def band_statistics(table: Table, analysis: str) -> list[str]:
    """The statistics that get a figure over layers; an analysis of the whole model has none."""
    rows = table.select(analysis=analysis)
    if all(row.site == MODEL for row in rows):
        return []
    return list(dict.fromkeys(row.statistic for row in rows))[:MOST]


def further_figures(shown: Sequence[Shown], analysis: str, *, legend: bool) -> Iterator[tuple[str, Figure]]:
    """Further bands and histograms for all runs together; curves, heat maps and pictures where there is one run."""
    tables = [one.table for one in shown]
    for statistic in _in_all(BANDS, analysis, tables):
        yield statistic, draw_bands(shown, analysis, statistic, legend=legend)
    for statistic in _in_all(HISTOGRAMS, analysis, tables):
        yield f"histogram-{statistic}", draw_histogram(shown, analysis, statistic, legend=legend)
    if len(tables) > 1:
        return
    table, name = tables[0], analysis.partition(":")[0]
    curves = {curve.statistic for curve in table.curves if curve.analysis == analysis}
    for (of, statistic), xlabel in CURVES.items():
        if of == name and statistic in curves:
            yield statistic, draw_curves(table, analysis, statistic, xlabel=xlabel, legend=legend)
    for statistic in _in_all(HEAT_MAPS, analysis, tables):
        yield f"heads-{statistic}", draw_heads(table, analysis, statistic)
    if curves.issuperset(JOINT):
        yield "joint", draw_norms(table, analysis, legend=legend)
    if name == "rollout" and "map" in curves:
        yield "map", draw_map(table, analysis)
    if analysis in table.pictures:
        yield "pictures", draw_pictures(table.pictures[analysis])


def _in_all(pairs: Iterable[tuple[str, str]], analysis: str, tables: Sequence[Table]) -> list[str]:
    """Those statistics of the analysis, whatever its settings, that every table has rows of."""
    named = [statistic for name, statistic in pairs if name == analysis.partition(":")[0]]
    return [s for s in named if all(table.select(analysis=analysis, statistic=s) for table in tables)]


def draw_bands(shown: Sequence[Shown], analysis: str, statistic: str, *, legend: bool = False) -> Figure:
    """The mean over heads for each layer, with the range of heads as a band, and every null that can tell."""
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        selected = [(one, one.table.select(analysis=analysis, statistic=statistic)) for one in shown]
        tables = [(one, rows) for one, rows in selected if rows]
        scale = Scale.of([row.mean for _, rows in tables for row in rows])
        single = len(shown) == 1
        for one, rows in tables:
            heads = by_site(rows, rows[0].null, "mean")
            places, colour = range(len(heads)), one.look.colour
            low, high = scale([min(values) for values in heads]), scale([max(values) for values in heads])
            axes.fill_between(places, low, high, color=colour, alpha=0.16, lw=0)
            look: dict[str, Any] = {"color": colour, "marker": one.look.marker if len(heads) <= 24 else ""}
            means = scale([statistics.fmean(values) for values in heads])
            axes.plot(places, means, markersize=3.5, label="observed" if single else one.name, **look)
            for null in telling_nulls(rows):
                drawn = [statistics.fmean(each) if each else math.nan for each in by_site(rows, null, "null_mean")]
                look = {"color": LIGHT["quiet"] if single else colour, "linestyle": DASHES[null], "linewidth": 1.3}
                axes.plot(places, scale(drawn), label=null, **look)
        axes.set(title=words(statistic), xlabel="layer", ylabel=axis_label(analysis, statistic))
        in_whole_numbers(axes.xaxis, 8)
        scale.label(axes)
        if legend:
            _stand_alone(figure, axes, f"{heading(analysis)}: {words(statistic)}")
    return figure


def telling_nulls(rows: Sequence[Row]) -> list[str]:
    """The nulls that do not leave the statistic of these rows as it is."""
    telling = {row.null for row in rows if row.claim != SAME_BY_CONSTRUCTION}
    return [null for null in NULLS if null in telling]


def draw_histogram(shown: Sequence[Shown], analysis: str, statistic: str, *, legend: bool = False) -> Figure:
    """Heads of all layers as bars, their nulls as lines; the outermost bins hold all that lies beyond."""
    tables = [(one, one.table.select(analysis=analysis, statistic=statistic)) for one in shown]
    numbers = [value for _, rows in tables for row in rows for value in (row.mean, row.null_mean) if value is not None]
    low, high = np.percentile(numbers, [2, 98])
    edges = np.linspace(low, high + 1e-12, 25)
    single = len(shown) == 1
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        for one, rows in tables:
            means = np.clip([row.mean for row in rows if row.null == rows[0].null], low, high)
            look: dict[str, Any] = {"color": one.look.colour, "label": "observed" if single else one.name}
            axes.hist(means, bins=edges.tolist(), alpha=0.45, **look)
            for null in telling_nulls(rows):
                drawn = [row.null_mean for row in rows if row.null == null and row.null_mean is not None]
                counts, _ = np.histogram(np.clip(drawn, low, high), bins=edges)
                look = {"color": LIGHT["ink"] if single else one.look.colour, "linestyle": DASHES[null]}
                axes.plot((edges[1:] + edges[:-1]) / 2, counts, linewidth=1.3, label=null, **look)
        title = f"heads by {words(statistic)}"
        axes.set(title=title, xlabel=axis_label(analysis, statistic), ylabel="number of heads")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        if legend:
            _stand_alone(figure, axes, f"{heading(analysis)}: {title}")
    return figure


def draw_heads(table: Table, analysis: str, statistic: str) -> Figure:
    """Two heat maps of one scale, layers down and heads across: what was observed, and the nearest null."""
    rows = table.select(analysis=analysis, statistic=statistic)
    pictures = {words(statistic): _grid(rows, "mean", rows[0].null)}
    if (null := _nearest(rows)) is not None:
        pictures[f"chance ({null})"] = _grid(rows, "null_mean", null)
    top = max(float(np.nanmax(grid)) for grid in pictures.values())
    low = min(0.0, *(float(np.nanmin(grid)) for grid in pictures.values()))
    layers = len(next(iter(pictures.values())))
    with figure_style():
        figure = Figure(figsize=(1.2 + 2.0 * len(pictures), 0.9 + 0.2 * layers), layout="constrained")
        panels = list(figure.subplots(1, len(pictures), squeeze=False)[0])
        for axes, (title, grid) in zip(panels, pictures.items(), strict=True):
            picture = axes.imshow(grid, cmap=heat(), vmin=low, vmax=top, aspect="auto", interpolation="nearest")
            axes.set(title=title, xlabel="head")
            axes.grid(visible=False)
            in_whole_numbers(axes.xaxis, 6)
        panels[0].set_ylabel("layer")
        bar = figure.colorbar(picture, ax=panels, shrink=0.9, label=axis_label(analysis, statistic))
        bar.outline.set_visible(False)
    return figure


def _nearest(rows: Sequence[Row]) -> str | None:
    """The null whose mean comes nearest to what was observed."""
    gaps = {}
    for null in telling_nulls(rows):
        of_null = [row.mean - row.null_mean for row in rows if row.null == null and row.null_mean is not None]
        gaps[null] = abs(statistics.fmean(of_null))
    return min(gaps, key=lambda null: gaps[null], default=None)


def _grid(rows: Sequence[Row], column: str, null: str | None) -> np.ndarray:
    """(layers, heads), NaN where there is no number."""
    sites = list(dict.fromkeys(row.site for row in rows))
    grid = np.full((len(sites), 1 + max(row.head or 0 for row in rows)), np.nan)
    for row in rows:
        if row.null == null and getattr(row, column) is not None:
            grid[sites.index(row.site), row.head or 0] = getattr(row, column)
    return grid


def draw_curves(table: Table, analysis: str, statistic: str, *, xlabel: str, legend: bool = False) -> Figure:
    """A statistic along its axis in the first, middle and last layer: mean over heads ± deviation.

    The nulls of the middle are dashed.
    """
    curves = [c for c in table.curves if c.analysis == analysis and c.statistic == statistic]
    observed = [curve for curve in curves if curve.null == ""]
    layers = sorted({0, len(observed) // 2, len(observed) - 1})
    middle = observed[layers[len(layers) // 2]]
    scale = Scale.of(np.concatenate([curve.mean.mean(0) for curve in observed]).tolist())
    title = words(statistic.removesuffix("_by_column"))
    with figure_style():
        figure, axes = new_axes(5.0, 3.1)
        positions = range(1, observed[0].mean.shape[-1] + 1)
        for layer in reversed(layers):
            colour = series(layers.index(layer)).colour
            mean, spread = observed[layer].mean.mean(0), observed[layer].mean.std(0, correction=0)
            low, high = scale((mean - spread).tolist()), scale((mean + spread).tolist())
            axes.fill_between(positions, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.plot(positions, scale(mean.tolist()), color=colour, label=f"layer {layer}")
        most = 1e-6 * middle.mean.abs().max()  # a null that moves nothing by more did not change the curve
        for curve in curves:
            if curve.null and curve.site == middle.site and (middle.mean - curve.mean).abs().max() > most:
                look: dict[str, Any] = {"color": LIGHT["quiet"], "linestyle": DASHES[curve.null], "linewidth": 1.3}
                label = curve.null if legend else None  # the page explains the nulls
                axes.plot(positions, scale(curve.mean.mean(0).tolist()), label=label, **look)
        axes.set(xlabel=xlabel, ylabel=axis_label(analysis, statistic))
        in_whole_numbers(axes.xaxis, 7)
        scale.label(axes)
        _stand_alone(figure, axes, f"{heading(analysis)}: {title}" if legend else title)
    return figure


def draw_map(table: Table, analysis: str) -> Figure:
    """The map of a rollout, averaged over images: bright where attention ends up."""
    curve = next(c for c in table.curves if c.analysis == analysis and c.statistic == "map" and not c.null)
    values = curve.mean.mean(0).numpy()
    side = math.isqrt(len(values))
    with figure_style():
        figure, axes = new_axes(3.6, 3.1)
        grid = values[: side * side].reshape(side, -1) * len(values)
        top = outlier_proof(grid)
        picture = axes.imshow(grid, cmap=heat(), vmin=0, vmax=top, interpolation="nearest")
        axes.set(xticks=[], yticks=[], title="where attention ends up, mean over images")
        axes.grid(visible=False)
        label = "share of a patch × number of patches" + ("; 2 % lie above" if grid.max() > top else "")
        extend = "max" if grid.max() > top else "neither"
        bar = figure.colorbar(picture, ax=axes, shrink=0.9, label=label, extend=extend)
        bar.outline.set_visible(False)
    return figure


def draw_norms(table: Table, analysis: str = "norms", *, legend: bool = False) -> Figure:
    """‖φ(q)‖² and ‖h‖² of tokens, layer by layer on one logarithmic axis (arXiv:2505.07908); chance is dashed.

    Lines are medians over tokens, dark bands hold the middle half of them, light ones 90 %; all are means over heads
    and images.
    """
    with figure_style():
        figure, axes = new_axes(5.0, 3.3)
        draw_norms_on(axes, table, analysis)
        axes.set_title("norms of tokens")
        if legend:
            _stand_alone(figure, axes, f"{analysis}: norms of tokens")
        else:
            axes.legend(loc="best", fontsize=8.5)
    return figure


def draw_norms_on(axes: Axes, table: Table, analysis: str) -> None:
    """The same on axes that are there."""
    for index, (statistic, label) in enumerate(zip(JOINT, ("‖φ(q)‖²", "‖h‖²"), strict=True)):
        look = series(index)
        levels = _levels(table, analysis, statistic, "")
        layers = range(len(levels))
        band: dict[str, Any] = {"color": look.colour, "linewidth": 0}
        axes.fill_between(layers, levels[:, LOWEST], levels[:, HIGHEST], alpha=0.10, **band)
        axes.fill_between(layers, levels[:, LOW], levels[:, HIGH], alpha=0.25, **band)
        axes.plot(layers, levels[:, MEDIAN], color=look.colour, marker=look.marker, markersize=4, label=label)
        chance = _levels(table, analysis, statistic, "gaussian")
        if len(chance):
            style: dict[str, Any] = {"color": look.colour, "linestyle": DASHES["gaussian"], "linewidth": 1.2}
            axes.plot(range(len(chance)), chance[:, MEDIAN], label=f"{label}, chance", **style)
    axes.set_xlabel("layer")
    in_whole_numbers(axes.xaxis, 8)
    in_whole_numbers(axes.yaxis, 5)
    axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))


def _levels(table: Table, analysis: str, statistic: str, null: str) -> np.ndarray:
    """log₁₀ of the quantiles, layer by layer, (layers, quantiles); means over heads."""
    key = (analysis, statistic, null)
    curves = [curve for curve in table.curves if (curve.analysis, curve.statistic, curve.null) == key]
    return np.array([curve.mean.mean(0).numpy() for curve in curves]).reshape(-1, len(QUANTILES))


def draw_training(
    rows: Sequence[Mapping[str, Any]], analysis: str, chosen: Sequence[str], *, title: str = ""
) -> Figure:
    """Statistics of an analysis over epochs, from the rows of analysis.jsonl: a colour each, batches by line."""
    rows = [row for row in rows if row["analysis"] == analysis]
    batches = list(dict.fromkeys(str(row["batch"]) for row in rows))
    lines = {
        (name, batch): [row for row in rows if (row["statistic"], str(row["batch"])) == (name, batch)]
        for name in chosen
        for batch in batches
    }
    scale = Scale.of([float(row["mean"]) for line in lines.values() for row in line])
    with figure_style():
        figure, axes = new_axes(5.0, 3.1)
        for (name, batch), line in lines.items():
            look: dict[str, Any] = {"color": series(chosen.index(name)).colour}
            look["linestyle"] = LINES[batches.index(batch) % len(LINES)]
            epochs = [float(row["epoch"]) + 1 for row in line]
            axes.plot(epochs, scale([float(row["mean"]) for row in line]), label=f"{words(name)}, {batch}", **look)
        axes.set(title=title or heading(analysis), xlabel="epoch", ylabel=axis_label(analysis, chosen[0]))
        in_whole_numbers(axes.xaxis, 7)
        scale.label(axes)
    return figure


def _stand_alone(figure: Figure, axes: Axes, title: str) -> None:
    """Title and legend for a figure outside the page; the legend keeps clear of the data."""
    axes.set_title(title)
    legend_below(figure, columns=4)


def draw_explanations(
    model: nn.Module,
    clean: Tensor,
    attacked: Tensor,
    explanation: str | Explanation = "relevance",
    *,
    classes: Tensor | None = None,
) -> Figure:
    """One row per image: clean, its explanation, attacked, its explanation.

    model: in eval mode.
    clean, attacked: the same images (B, 3, h, w) in [0, 1].
    explanation: as in `vitruvius.analysis.explain`.
    classes: (B) those asked about; default: what the model answers.
    """
    if clean.shape != attacked.shape:
        raise DataError(
            f"clean images are {tuple(clean.shape)}, attacked ones {tuple(attacked.shape)}; one shape each."
        )
    maps = [explain(model, images, explanation, classes=classes) for images in (clean, attacked)]
    return draw_pictures(Pictures(clean=clean, clean_map=maps[0], attacked=attacked, attacked_map=maps[1]))


def draw_pictures(pictures: Pictures) -> Figure:
    """One row per image: clean, its map laid over it and, where there was an attack, the same attacked.

    Every map has its own scale, from its lowest value to its 98th percentile, so that outliers bleach nothing.
    """
    views = {"clean": (pictures.clean, None), "rests on": (pictures.clean, pictures.clean_map)}
    if pictures.attacked is not None and pictures.attacked_map is not None:
        views |= {"attacked": (pictures.attacked, None), "now rests on": (pictures.attacked, pictures.attacked_map)}
    rows = len(pictures.clean)
    with figure_style():
        figure = Figure(figsize=(1.7 * len(views), 1.7 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, len(views), squeeze=False)
        for column, (title, (images, maps)) in enumerate(views.items()):
            grid[0, column].set_title(title, fontsize=9)
            for row, image in enumerate(images.detach().cpu().float().clamp(0, 1).movedim(1, -1).numpy()):
                axes = grid[row, column]
                axes.set_axis_off()
                if maps is None:
                    axes.imshow(image, cmap="gray", interpolation="nearest")
                    continue
                values, (height, width) = maps[row].detach().cpu().float().numpy(), image.shape[:2]
                axes.imshow(image.mean(-1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                look: dict[str, Any] = {"cmap": heat(), "alpha": 0.65, "interpolation": "nearest"}
                place = (-0.5, width - 0.5, height - 0.5, -0.5)
                axes.imshow(values, vmin=values.min(), vmax=outlier_proof(values), extent=place, **look)
        figure.supxlabel("dark where most; each from its lowest value to its 98th percentile", fontsize=8)
    return figure


def heading(analysis: str) -> str:
    """The heading of an analysis in words, with its settings: `norms:variant=released` → Norms … (variant released)."""
    name, _, settings = analysis.partition(":")
    told = f" ({settings.replace('=', ' ').replace(',', ', ')})" if settings else ""
    return HEADINGS.get(name, words(name).capitalize()) + told


def axis_label(analysis: str, statistic: str) -> str:
    """What stands beside the axis of `statistic` of `analysis`: the quantity and its unit."""
    name = f"{analysis.partition(':')[0]}.{statistic.removesuffix('_by_column')}"
    return LABELS.get(name, words(statistic))


def words(name: str) -> str:
    """`name` for a reader: matched_cosine → matched cosine."""
    for code, sign in (("_", " "), ("cka", "CKA"), ("log10", "log₁₀"), ("phi2", "‖φ(q)‖²"), ("h2", "‖h‖²")):
        name = name.replace(code, sign)
    return name
