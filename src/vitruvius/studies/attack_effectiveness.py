"""How many steps does an attack need? PGD with 1, 2, 5, 10, 200 steps × seeds, on every epoch that a run has kept.

The light recipe trains against one step; whether one step is enough is what this study shows
(Debenedetti et al. 2023, arXiv:2209.07399). If the loss keeps rising with more steps, the shorter attack misleads:
`loss_gap` is |L_k − L_K| / L_K, where L_k is the mean cross-entropy under k steps and K the longest attack (200).
Each model's folder holds summary.csv, with the columns and units of the paper's attack_effectiveness.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text
from vitruvius._notebook import to_csv
from vitruvius._style import figure_style, legend_below
from vitruvius.attacks.base import LINF, Norm
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.result import wilson
from vitruvius.studies._base import Row, Subject, folder_of, studies
from vitruvius.studies._figures import draw_line, gather, names, spread


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
    steps: lengths of the attack, of 1.5 eps / steps each.
    seeds: of the random starts.
    epochs: kept epochs of a run, counted from 1; null: all of them, or the model as it is.
    norm: of the ball: linf, l2 or l1.
    """
    for length in steps:
        check_count(length, "steps")
    missing = [epoch for epoch in epochs or () if epoch not in subject.kept]
    if missing:
        known = ", ".join(map(str, subject.kept)) or "none"
        raise ConfigError(
            f"{subject.name} has not kept epoch {missing[0]}; kept: {known}. Train with train.keep={{every: 10}}."
        )
    for epoch in epochs or subject.kept or [None]:
        model = subject.model if epoch is None else subject.model_at(epoch)
        for length, seed in product(steps, seeds):
            key = f"{epoch or 'best'}/{length}/{seed}"
            if key in done:
                continue
            attack = PGD(eps=eps, steps=length, step_size=1.5 * eps / length, seed=seed, norm=norm)
            clean, score = evaluate(model, subject, [attack], progress=subject.progress).threats
            low, high = wilson(score.correct, score.n)
            yield {
                "key": key,
                "epoch": epoch,
                "steps": length,
                "seed": seed,
                "eps": eps,
                "clean_accuracy": clean.accuracy,
                "accuracy": score.accuracy,
                "low": low,
                "high": high,
                "adv_loss": score.loss,
                "n": score.n,
                "clean_loss": clean.loss,
                "clean_top5": clean.top5,
                "top5": score.top5,
                "architecture": subject.architecture,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "image_size": model.data_config["input_size"][-1],
                "crop_pct": model.data_config.get("crop_pct"),
                "interpolation": model.data_config.get("interpolation"),
            }


def add_loss_gap(rows: list[Row]) -> list[Row]:
    """`rows` with `loss_gap`: the distance of the mean loss from that of the longest attack, by seed and epoch."""
    longest = max(row["steps"] for row in rows)
    place = ("model", "epoch", "seed", "eps")
    ends = {tuple(row[key] for key in place): row["adv_loss"] for row in rows if row["steps"] == longest}
    gaps = []
    for row in rows:
        end = ends.get(tuple(row[key] for key in place))
        gaps.append({**row, "loss_gap": abs(row["adv_loss"] - end) / end if end else None})
    return gaps


def write_summaries(rows: list[Row], folder: Path, _: Mapping[str, Any]) -> list[tuple[str, Figure]]:
    """summary.csv for each model of `rows`, in its own folder within `folder`; no figures."""
    for model in names(rows):
        own = [_as_published(row) for row in rows if row["model"] == model]
        atomic_write_text(folder_of(folder, model) / "summary.csv", to_csv(own))
    return []


def _as_published(row: Row) -> Row:
    """Per cent, millions of parameters, epochs counted from 0, and the published misspelling."""
    shares = {"top1": "clean_accuracy", "top5": "clean_top5", "robust_top1": "accuracy", "robust_top5": "top5"}
    percent = {theirs: round(100 * row[ours], 4) for theirs, ours in shares.items() if row[ours] is not None}
    return {
        **{key: number for k, v in percent.items() for key, number in ((k, v), (f"{k}_err", round(100 - v, 4)))},
        "loss": row["clean_loss"],
        "adv_loss": row["adv_loss"],
        "param_count": round(row["parameters"] / 1e6, 2),
        "img_size": row["image_size"],
        "cropt_pct": row["crop_pct"],
        "interpolation": row["interpolation"],
        "attack": "pgd",
        "attack_steps": row["steps"],
        "model": row["architecture"],
        "epoch": None if row["epoch"] is None else row["epoch"] - 1,
        "seed": row["seed"],
    }


def draw(rows: list[Row]) -> Figure:
    """Loss gap and accuracy of all `rows`: against the epoch with a panel per model as in the paper, else the steps."""
    models = names(rows)
    by_epoch = any(row["epoch"] is not None for row in rows)
    with figure_style():
        if by_epoch:
            figure = Figure(figsize=(1.2 + 4.2 * len(models), 5.6), layout="constrained")
            grid = figure.subplots(2, len(models), squeeze=False, sharex="col", sharey="row")
        else:
            figure = Figure(figsize=(9.2, 3.3), layout="constrained")
            grid = figure.subplots(1, 2).reshape(2, 1)
        for place, model in enumerate(models):
            own = [row for row in rows if row["model"] == model]
            column = grid[:, place if by_epoch else 0]
            if by_epoch:
                column[0].set_title(str(model))
                for index, length in enumerate(sorted(names(own, "steps"))):
                    _draw_both(column, index, f"PGD-{length}", [r for r in own if r["steps"] == length], "epoch")
            else:
                _draw_both(column, place, model, own, "steps")
        longest = max(row["steps"] for row in rows)
        grid[0, 0].set_ylabel(f"|L_k − L_{longest}| / L_{longest}, %")
        grid[1, 0].set_ylabel("accuracy, %")
        for axes in grid[-1] if by_epoch else grid.flatten():
            axes.set_xlabel("epoch" if by_epoch else "steps of PGD")
            if by_epoch:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            else:
                steps = sorted(names(rows, "steps"))
                axes.set_xscale("log")
                axes.set_xticks(steps, [str(step) for step in steps])
                axes.minorticks_off()
        legend_below(figure, columns=5 if by_epoch else 3)
    return figure


def _draw_both(column: Any, index: int, label: str, rows: list[Row], across: str) -> None:
    """Loss gap and accuracy in per cent: the mean over seeds, with a band from the least to the largest."""
    for axes, name in zip(column, ("loss_gap", "accuracy"), strict=True):
        points = {x: spread([100 * value for value in values]) for x, values in gather(rows, across, name).items()}
        if points:
            draw_line(axes, index, label, points)


attack_effectiveness.draw = draw
attack_effectiveness.finish = add_loss_gap
attack_effectiveness.further = write_summaries
