"""How many steps does an attack need? PGD with 1, 2, 5, 10, 200 steps × seeds, on every checkpoint.

The light recipe trains against one step; whether one step is enough is what this study shows
(Debenedetti et al. 2023, arXiv:2209.07399). If accuracy keeps falling with more steps, the shorter attack misleads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

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
                subject.model, list(subject.batches()), [PGD(eps=eps, steps=length, seed=seed, norm=norm)]
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
    """Accuracy against steps, one line a model, its spread over seeds as a band."""
    with figure_style():
        figure, axes = new_axes()
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            own = [row for row in rows if row["model"] == model]
            steps = sorted({row["steps"] for row in own})
            found = [[row["accuracy"] for row in own if row["steps"] == step] for step in steps]
            look: Any = series(index)
            means = [statistics.mean(values) for values in found]
            axes.plot(steps, means, marker=look.marker, color=look.colour, label=model)
            axes.fill_between(
                steps, [min(v) for v in found], [max(v) for v in found], color=look.colour, alpha=0.2, linewidth=0
            )
        axes.set_xscale("log")
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.set_xlabel("steps of PGD")
        axes.set_ylabel("accuracy")
        axes.legend()
    return figure


attack_effectiveness.draw = draw
