"""A picture of explanations: images as they are and attacked, side by side, each with what the answer rests on."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius.analysis.explanations import Explanation, explain
from vitruvius.analysis.table import Pictures
from vitruvius.report.style import figure_style, heat, outlier_proof


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
