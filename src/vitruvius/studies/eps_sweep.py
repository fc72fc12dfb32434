"""How strong must an attack be? Accuracy against ε, in pixels, or in normalised units as the KPCA scripts counted.

Those scripts attack images that are already normalised, without clipping: their ε is a number of standard
deviations, so "1/255" is about 0.225/255 in pixels and differs from channel to channel. `space="normalised"`
does the same with true labels, for comparison with that paper only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import wilson
from vitruvius.report.style import figure_style, new_axes, series
from vitruvius.studies._base import Row, Subject, studies

Space = Literal["pixels", "normalised"]


@studies.register("eps-sweep")
def eps_sweep(
    subject: Subject,
    done: set[str],
    *,
    eps: tuple[float, ...] = (1 / 255, 2 / 255, 3 / 255, 4 / 255, 5 / 255, 6 / 255),
    steps: int = 20,
    space: Space = "pixels",
    seed: int = 0,
) -> Iterator[Row]:
    """Accuracy under PGD of growing strength, in pixels or in the paper's normalised units."""
    for strength in eps:
        key = f"{space}/{strength:.6g}"
        if key not in done:
            correct = sum(_correct(subject, x, y, ids, strength, steps, space, seed) for x, y, ids in subject.batches())
            n = len(subject.y)
            low, high = wilson(correct, n)
            yield {
                "key": key,
                "space": space,
                "eps": strength,
                "steps": steps,
                "accuracy": correct / n,
                "low": low,
                "high": high,
                "n": n,
            }


def _correct(
    subject: Subject, x: Tensor, y: Tensor, ids: Tensor, eps: float, steps: int, space: Space, seed: int
) -> int:
    """Images of a batch that stay correct."""
    pixels, model = subject.model, subject.model.model
    step = 0.15 * eps  # the KPCA scripts' step
    if space == "pixels":
        moved = PGD(eps=eps, steps=steps, step_size=step, seed=seed)(pixels, x, y, ids=ids)
        with torch.no_grad():
            return int((pixels(moved).argmax(1) == y).sum())
    unbounded = PGD(eps=eps, steps=steps, step_size=step, seed=seed, bounds=(-torch.inf, torch.inf))
    moved = unbounded(model, (x - pixels.mean) / pixels.std, y, ids=ids)
    with torch.no_grad():
        return int((model(moved).argmax(1) == y).sum())


def draw(rows: list[Row]) -> Figure:
    """Accuracy against ε, one line per model and space."""
    with figure_style():
        figure, axes = new_axes()
        for index, kind in enumerate(dict.fromkeys(_kind(row) for row in rows)):
            own = [row for row in rows if _kind(row) == kind]
            _draw_line(axes, sorted(own, key=lambda row: float(row["eps"])), series(index), f"{kind[0]} ({kind[1]})")
        axes.set_xlabel("ε × 255")
        axes.set_ylabel("accuracy")
        axes.legend()
    return figure


def _kind(row: Row) -> tuple[str, str]:
    """What one line shows: a model, in pixels or in normalised units."""
    return str(row["model"]), str(row["space"])


def _draw_line(axes: Any, rows: list[Row], look: Any, label: str) -> None:
    strengths = [255 * row["eps"] for row in rows]
    lows = [row["low"] for row in rows]
    highs = [row["high"] for row in rows]
    axes.plot(strengths, [row["accuracy"] for row in rows], marker=look.marker, color=look.colour, label=label)
    axes.fill_between(strengths, lows, highs, color=look.colour, alpha=0.2, linewidth=0)


eps_sweep.draw = draw
