"""Figures of `look` for a paper: pictures under what they attend to, and all heads of a layer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitruvius._style import figure_style, heat, save_figure
from vitruvius.look.looking import Look, View
from vitruvius.look.pictures import as_uint8

LOW, HIGH = 1, 99  # percentiles between which colours are spread
HEADS_IN_ROW = 6
TITLE = 28  # letters in a line
Panel = tuple[str, np.ndarray | None]  # a title, and what lies over the picture


def save_figures(look: Look, folder: Path) -> list[Path]:
    """Write `look` into `folder`, picture by picture: an overview of its views, and all heads of the last layer."""
    files = []
    for number, picture in enumerate(dict.fromkeys(view.picture for view in look.views)):
        views = [view for view in look.views if view.picture == picture]
        stem = f"{number + 1}-{re.sub(r'[^A-Za-z0-9]+', '-', Path(picture).stem).strip('-') or 'picture'}"
        files += save_figure(draw_overview(views)[0], folder / f"{stem}-overview")
        if any(layer.kind != "matrix" for view in views for layer in view.layers):
            files += save_figure(draw_heads(views), folder / f"{stem}-heads")
    return files


def draw_overview(
    views: Sequence[View], layer: str | int = -1, head: int | None = None, make: Callable[..., Figure] = Figure
) -> tuple[Figure, np.ndarray]:
    """One row for each of the views: the picture, attention in a layer, rollout, explanations; and its axes.

    layer: by name or number. head: default: the mean of all. make: the figure, as `Figure` does.
    """
    return _draw_rows([(view, _panels(view, layer, head)) for view in views], 2.3, 2.65, make)


def draw_heads(views: Sequence[View], layer: str | int = -1) -> Figure:
    """All heads of a layer, by name or number, for each of the views, from the token that answers."""
    rows = []
    for view in views:
        if view.layers and (found := view.layer(layer)).kind != "matrix":
            heads: list[Panel] = [(f"head {h + 1}", found.over(h)) for h in range(found.num_heads)]
            heads[0] = (f"{view.title}, head 1", heads[0][1])
            rows += [(view, heads[first : first + HEADS_IN_ROW]) for first in range(0, len(heads), HEADS_IN_ROW)]
    return _draw_rows(rows, 2.0, 2.35)[0]


def _draw_rows(
    rows: Sequence[tuple[View, list[Panel]]], width: float, height: float, make: Callable[..., Figure] = Figure
) -> tuple[Figure, np.ndarray]:
    """Panels of `width` by `height` inches, a row for each view; and their axes."""
    wide = max(len(panels) for _, panels in rows)
    with figure_style():
        figure = make(figsize=(width * wide, height * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), wide, squeeze=False)
        for (view, panels), row in zip(rows, axes, strict=True):
            for cell in row:
                cell.set_axis_off()
            for (title, over), cell in zip(panels, row, strict=False):
                _draw(figure, cell, view, title, over)
    return figure, axes


def _panels(view: View, layer: str | int, head: int | None) -> list[Panel]:
    best = f"\n{view.answers[0].name} {100 * view.answers[0].probability:.0f} %" if view.answers else ""
    panels: list[Panel] = [(view.title + best, None)]
    if view.layers and view.layer(layer).kind != "matrix":
        found = view.layer(layer)
        which = "mean of heads" if head is None else f"head {head + 1}"
        panels.append((f"{found.name}\n{which}", found.over(head)))
    if view.rollout is not None:
        panels.append(("rollout", view.rollout))
    for method, maps in (("relevance", view.relevance), ("integrated gradients", view.gradients)):
        panels += [(f"{method}\n{name}", map_) for name, map_ in list(maps.items())[:1]]
    return panels


def _draw(figure: Figure, axes: Axes, view: View, title: str, over: np.ndarray | None) -> None:
    pixels = as_uint8(view.pixels).transpose(1, 2, 0)
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title("\n".join(textwrap.fill(line, TITLE) for line in title.splitlines()), fontsize=8)
    if over is None:
        return
    low, high = np.percentile(over, [LOW, HIGH])
    height, width = pixels.shape[:2]
    settings: dict[str, Any] = {"extent": (-0.5, width - 0.5, height - 0.5, -0.5), "interpolation": "nearest"}
    image = axes.imshow(over, cmap=heat().reversed(), vmin=low, vmax=max(high, low + 1e-12), alpha=0.7, **settings)
    bar = figure.colorbar(image, ax=axes, orientation="horizontal", fraction=0.05, pad=0.03, extend="both")
    bar.set_ticks([low, high], labels=[f"{low:.1g}", f"{high:.1g}"])
    bar.ax.tick_params(labelsize=7)
