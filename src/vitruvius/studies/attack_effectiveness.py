"""How many steps does an attack need? PGD with 1, 2, 5, 10, 200 steps × seeds, on every checkpoint.

The light recipe trains against one step; whether one step is enough is what this study shows
(Debenedetti et al. 2023, arXiv:2209.07399). If accuracy keeps falling with more steps, the shorter attack misleads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitruvius.attacks import LINF, Norm
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import evaluate, wilson
from vitruvius.report.style import figure_style, new_axes, series
from vitruvius.studies._base import Row, Subject, studies


@studies.register("attack-effectiveness")
def attack_effectiveness(
    subject: Subject,
    done: set[str],
    *,
    eps: float = 4 / 255,
    steps: tuple[int, ...] = (1, 2, 5, 10, 200),
    seeds: tuple[int, ...] = (0, 1, 2),
    norm: Norm = LINF,
) -> Iterator[Row]:
    """Accuracy under PGD of growing length, for several seeds and checkpoints."""
    for length in steps:
        for seed in seeds:
            key = f"{length}/{seed}"
            if key in done:
                continue
            report = evaluate(
                subject.model,
                list(subject.batches()),
                [PGD(eps=eps, steps=length, step_size=1.5 * eps / length, seed=seed, norm=norm)],  # the paper's step
            )
            score = report.threats[-1]
            low, high = wilson(score.correct, score.n)
            yield {
                "key": key,
                "steps": length,
                "seed": seed,
                "eps": eps,
                "clean_accuracy": report["clean"].accuracy,
                "accuracy": score.accuracy,
                "low": low,
                "high": high,
                "n": score.n,
            }


def draw(rows: list[Row]) -> Figure:
    """Accuracy against steps, one line per model, its spread over seeds as a band."""
    with figure_style():
        figure, axes = new_axes()
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            _draw_model(axes, index, model, [row for row in rows if row["model"] == model])
        steps = sorted({row["steps"] for row in rows})
        axes.set_xscale("log")
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.set_xlabel("steps of PGD")
        axes.set_ylabel("accuracy")
        axes.legend()
    return figure


def _draw_model(axes: Axes, index: int, model: str, rows: list[Row]) -> None:
    by_steps: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["steps"])):
        by_steps.setdefault(row["steps"], []).append(row["accuracy"])
    steps = list(by_steps)
    means = [statistics.mean(values) for values in by_steps.values()]
    lows = [min(values) for values in by_steps.values()]
    highs = [max(values) for values in by_steps.values()]
    look = series(index)
    axes.plot(steps, means, marker=look.marker, color=look.colour, label=model)
    axes.fill_between(steps, lows, highs, color=look.colour, alpha=0.2, linewidth=0)


attack_effectiveness.draw = draw
