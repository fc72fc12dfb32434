"""A picture of explanations: images as they are and attacked, side by side, each with what the answer rests on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius.analysis.explanations import Explanation, explain
from vitruvius.analysis.table import Pictures
from vitruvius.report.style import figure_style, heat


def draw_explanations(
    model: nn.Module,
    clean: Tensor,
    attacked: Tensor,
    explanation: str | Explanation = "relevance",
    *,
    classes: Tensor | None = None,
) -> Figure:
    """One row per image: clean, its explanation, attacked, its explanation.

    `clean` and `attacked` are the same images (B, 3, h, w) in [0, 1]; `explanation` as in
    `vitruvius.analysis.explanations.explain`; `classes` (B) are those asked about, by default what the model answers.

    `model` is in eval mode.
    """
    if clean.shape != attacked.shape:
        raise DataError(
            f"clean images are {tuple(clean.shape)}, attacked ones {tuple(attacked.shape)}; one shape each."
        )
    return draw_pictures(
        Pictures(
            clean=clean,
            clean_map=explain(model, clean, explanation, classes=classes),
            attacked=attacked,
            attacked_map=explain(model, attacked, explanation, classes=classes),
        )
    )


def draw_pictures(pictures: Pictures) -> Figure:
    """One row per image: clean, its explanation and, where there was an attack, the same attacked.

    `pictures` as `vitruvius.analysis.explain_images` keeps them in its table.
    """
    columns = {"clean": pictures.clean, "rests on": pictures.clean_map}
    if pictures.attacked is not None and pictures.attacked_map is not None:
        columns |= {"attacked": pictures.attacked, "now rests on": pictures.attacked_map}
    return _draw_columns(columns, len(pictures.clean))


def _draw_columns(columns: Mapping[str, Tensor], rows: int) -> Figure:
    with figure_style():
        figure = Figure(figsize=(1.7 * len(columns), 1.7 * rows + 0.3), layout="constrained")
        for column, (title, shown) in enumerate(columns.items()):
            for row, picture in enumerate(shown.detach().cpu().float().numpy()):
                axes = figure.add_subplot(rows, len(columns), row * len(columns) + column + 1)
                axes.imshow(_shown(picture), cmap=heat(), interpolation="nearest")
                axes.set_axis_off()
                if row == 0:
                    axes.set_title(title, fontsize=9)
    return figure


def _shown(picture: np.ndarray) -> np.ndarray:
    """(3, h, w) pixels with the colours last; a map as it is."""
    if picture.ndim == 2:
        return picture
    shown: np.ndarray = np.clip(picture.transpose(1, 2, 0), 0, 1)
    return shown
