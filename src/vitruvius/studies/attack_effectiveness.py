"""How many steps does an attack need? PGD with 1, 2, 5, 10, 200 steps × seeds, on every epoch that a run has kept.

The light recipe trains against one step; whether one step is enough is what this study shows
(Debenedetti et al. 2023, arXiv:2209.07399). If the loss keeps rising with more steps, the shorter attack misleads:
`loss_gap` is |L_k − L_K| / L_K, where L_k is the mean cross-entropy under k steps and K the longest attack (200).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError
from vitruvius.attacks.base import LINF, Norm
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.result import wilson
from vitruvius.report.style import figure_style, legend_below, series
from vitruvius.studies._base import Row, Subject, studies


@studies.register("attack-effectiveness")
def attack_effectiveness(
    subject: Subject,
    done: set[str],
    *,
    eps: float = 4 / 255,
    steps: tuple[int, ...] = (1, 2, 5, 10, 200),
    seeds: tuple[int, ...] = (0, 1, 2),
    epochs: tuple[int, ...] | None = None,
    norm: Norm = LINF,
) -> Iterator[Row]:
    """Accuracy and loss under PGD of growing length, for several seeds and every kept epoch of a run.

    subject: a model and the images it is studied on.
    done: keys of the rows that are there already.
    eps: radius of the attack, in pixels of images in [0, 1].
    steps: lengths of the attack.
    seeds: of the random starts.
    epochs: kept epochs of a run, counted from 1; null: all of them, or the model as it is.
    norm: of the ball: linf, l2 or l1.
    """
    for length in steps:
        check_count(length, "steps")
    for epoch in _epochs_of(subject, epochs):
        model = subject.model
        if epoch is not None:
            model = subject.model_at(epoch)
        for length in steps:
            for seed in seeds:
                key = f"{epoch or 'best'}/{length}/{seed}"
                if key in done:
                    continue
                attack = PGD(eps=eps, steps=length, step_size=1.5 * eps / length, seed=seed, norm=norm)  # the paper's
                report = evaluate(model, list(subject.batches()), [attack], progress=subject.progress)
                score = report.threats[-1]
                low, high = wilson(score.correct, score.n)
                yield {
                    "key": key,
                    "epoch": epoch,
                    "steps": length,
                    "seed": seed,
                    "eps": eps,
                    "clean_accuracy": report["clean"].accuracy,
                    "accuracy": score.accuracy,
                    "low": low,
                    "high": high,
                    "adv_loss": score.loss,
                    "n": score.n,
                }


def _epochs_of(subject: Subject, wanted: Sequence[int] | None) -> list[int | None]:
    """The kept epochs that were asked for; of a model without any, None: its best weights."""
    if wanted is None:
        return [*subject.kept] or [None]
    missing = [epoch for epoch in wanted if epoch not in subject.kept]
    if missing:
        known = ", ".join(map(str, subject.kept)) or "none"
        raise ConfigError(
            f"{subject.name} has not kept epoch {missing[0]}; kept: {known}. Train with train.keep={{every: 10}}."
        )
    return list(wanted)


def add_loss_gap(rows: list[Row]) -> list[Row]:
    """Rows with `loss_gap`: how far the mean loss is from that of the longest attack, with the same seed and epoch.

    `rows` are those of all models; they are not changed.
    """
    longest = max(int(row["steps"]) for row in rows)
    ends = {_place(row): row["adv_loss"] for row in rows if row["steps"] == longest}
    return [{**row, "loss_gap": _gap(row["adv_loss"], ends.get(_place(row)))} for row in rows]


def _place(row: Row) -> tuple[Any, ...]:
    return row["model"], row["epoch"], row["seed"], row["eps"]


def _gap(loss: float, end: float | None) -> float | None:
    if not end:
        return None
    return abs(loss - end) / end


def draw(rows: list[Row]) -> Figure:
    """Loss gap and accuracy: against the epoch with a panel per model as in the paper, else against the steps.

    `rows` are those of all models, with their loss gap.
    """
    with figure_style():
        if any(row["epoch"] is not None for row in rows):
            return _draw_epochs(rows)
        return _draw_steps(rows)


def _draw_epochs(rows: list[Row]) -> Figure:
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(1.2 + 4.2 * len(models), 5.6), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharex="col", sharey="row")
    for column, model in enumerate(models):
        own = [row for row in rows if row["model"] == model]
        for index, length in enumerate(sorted({row["steps"] for row in own})):
            chosen = [row for row in own if row["steps"] == length]
            _draw_line(panels[0][column], index, f"PGD-{length}", chosen, "epoch", "loss_gap")
            _draw_line(panels[1][column], index, f"PGD-{length}", chosen, "epoch", "accuracy")
        panels[0][column].set_title(str(model))
        panels[1][column].set_xlabel("epoch")
        panels[1][column].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    _label(panels[0][0], panels[1][0], rows)
    legend_below(figure, columns=5)
    return figure


def _draw_steps(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(9.2, 3.3), layout="constrained")
    gap, accuracy = figure.subplots(1, 2)
    for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        own = [row for row in rows if row["model"] == model]
        _draw_line(gap, index, model, own, "steps", "loss_gap")
        _draw_line(accuracy, index, model, own, "steps", "accuracy")
    steps = sorted({row["steps"] for row in rows})
    for axes in (gap, accuracy):
        axes.set_xscale("log")
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.minorticks_off()
        axes.set_xlabel("steps of PGD")
    _label(gap, accuracy, rows)
    legend_below(figure)
    return figure


def _label(gap: Axes, accuracy: Axes, rows: list[Row]) -> None:
    longest = max(int(row["steps"]) for row in rows)
    gap.set_ylabel(f"|L_k − L_{longest}| / L_{longest}, %")
    accuracy.set_ylabel("accuracy, %")


def _draw_line(axes: Axes, index: int, label: str, rows: list[Row], across: str, column: str) -> None:
    """One line in per cent: the mean over seeds, with a band from the least to the largest."""
    by_place: dict[float, list[float]] = {}
    for row in sorted(rows, key=lambda row: float(row[across] or 0)):
        if row[column] is not None:
            by_place.setdefault(row[across], []).append(100 * row[column])
    places = list(by_place)
    look = series(index)
    means = [statistics.mean(values) for values in by_place.values()]
    lows = [min(values) for values in by_place.values()]
    highs = [max(values) for values in by_place.values()]
    axes.plot(places, means, marker=look.marker, color=look.colour, label=label)
    axes.fill_between(places, lows, highs, color=look.colour, alpha=0.2, linewidth=0)


attack_effectiveness.draw = draw
attack_effectiveness.finish = add_loss_gap
