"""A picture of explanations: images as they are and attacked, side by side, each with what the answer rests on."""

from __future__ import annotations

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
    """One row per image: clean, its explanation and, where there was an attack, the same attacked."""
    columns = {"clean": pictures.clean, "rests on": pictures.clean_map}
    if pictures.attacked is not None and pictures.attacked_map is not None:
        columns |= {"attacked": pictures.attacked, "now rests on": pictures.attacked_map}
    rows = len(pictures.clean)
    with figure_style():
        figure = Figure(figsize=(1.7 * len(columns), 1.7 * rows + 0.3), layout="constrained")
        for column, (title, tensor) in enumerate(columns.items()):
            for row, shown in enumerate(tensor.detach().cpu().float().numpy()):
                axes = figure.add_subplot(rows, len(columns), row * len(columns) + column + 1)
                pixels = shown if shown.ndim == 2 else np.clip(shown.transpose(1, 2, 0), 0, 1)  # colours last
                axes.imshow(pixels, cmap=heat(), interpolation="nearest")
                axes.set_axis_off()
                if row == 0:
                    axes.set_title(title, fontsize=9)
    return figure
