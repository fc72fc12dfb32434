"""How does the loss climb? The mean loss before every step of one long PGD, and the images fooled so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from matplotlib.figure import Figure

from vitruvius.attacks import LINF, Dice, Norm, frozen, full_precision
from vitruvius.attacks.pgd import PGD
from vitruvius.report.style import figure_style, new_axes, series
from vitruvius.studies._base import Row, Subject, studies


@studies.register("attack-convergence")
def attack_convergence(
    subject: Subject,
    done: set[str],
    *,
    eps: float = 4 / 255,
    steps: int = 50,
    step_size: float | None = None,
    seed: int = 0,
    norm: Norm = LINF,
) -> Iterator[Row]:
    """Loss and accuracy at every step of a long PGD."""
    if "0" in done and str(steps) in done:
        return
    attack = PGD(eps=eps, steps=steps, step_size=step_size, seed=seed, norm=norm)
    losses = torch.zeros(steps + 1, dtype=torch.float64)
    correct = torch.zeros(steps + 1, dtype=torch.float64)
    with torch.no_grad(), frozen(subject.model):
        for x, y, ids in subject.batches():
            dice = Dice(ids.to(x.device), seed)
            for step, (point, here) in enumerate(attack.ascend(subject.model, x, y, attack.start(x, dice))):
                if here is None:
                    logits = full_precision(subject.model(point))
                else:
                    logits = here.logits
                losses[step] += attack.objective(logits, y).double().sum().cpu()
                correct[step] += (logits.argmax(1) == y).double().sum().cpu()
    n = len(subject.y)
    for step in range(steps + 1):
        if str(step) not in done:
            accuracy, loss = float(correct[step] / n), float(losses[step] / n)
            yield {"key": str(step), "step": step, "eps": eps, "loss": loss, "accuracy": accuracy, "n": n}


def draw(rows: list[Row]) -> Figure:
    """Loss against the step, one line per model."""
    with figure_style():
        figure, axes = new_axes()
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            own = [row for row in rows if row["model"] == model]
            look: Any = series(index)
            axes.plot([row["step"] for row in own], [row["loss"] for row in own], color=look.colour, label=model)
        axes.set_xlabel("step of PGD")
        axes.set_ylabel("mean loss")
        axes.legend()
    return figure


attack_convergence.draw = draw
