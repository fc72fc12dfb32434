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
        for index, (model, space) in enumerate(dict.fromkeys((row["model"], row["space"]) for row in rows)):
            own = sorted((r for r in rows if (r["model"], r["space"]) == (model, space)), key=lambda r: float(r["eps"]))
            look: Any = series(index)
            strengths = [255 * row["eps"] for row in own]
            label = f"{model} ({space})"
            axes.plot(strengths, [r["accuracy"] for r in own], marker=look.marker, color=look.colour, label=label)
            lows, highs = [r["low"] for r in own], [r["high"] for r in own]
            axes.fill_between(strengths, lows, highs, color=look.colour, alpha=0.2, linewidth=0)
        axes.set_xlabel("ε × 255")
        axes.set_ylabel("accuracy")
        axes.legend()
    return figure


eps_sweep.draw = draw
