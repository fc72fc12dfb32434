"""Studies of an attack's strength: of how many steps, at which ε, by which protocol, and whether it has converged."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import atomic_write_text, save_tensors
from vitruvius._notebook import to_csv
from vitruvius._registry import read_spec
from vitruvius._style import figure_style, legend_below, new_axes
from vitruvius.attacks.base import LINF, Attack, Norm, attacks, frozen, full_precision
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import describe, evaluate, make_threat
from vitruvius.evaluation.result import wilson
from vitruvius.evaluation.threats import Threat
from vitruvius.studies._base import (
    Band,
    Row,
    Subject,
    draw_accuracy,
    draw_line,
    folder_of,
    gather,
    names,
    panels,
    spread,
    studies,
)

Space = Literal["pixels", "normalised"]
Labels = Literal["true", "predicted"]
BOUNDS = {"pixels": (0.0, 1.0), "normalised": (-torch.inf, torch.inf)}  # not clipped, as in the KPCA paper's code
STEPS = 20  # of that code's PGD
STEP = 0.15  # of ε, its length
CROSSING = 10  # with fewer of its steps an attack could not cross the ball and would flatter the model
CONVERGENCE = (0, 1, 2, 5, 10, 50, 100, 200, 500)


def _accuracy(correct: int, n: int) -> Row:
    low, high = wilson(correct, n)
    return {"accuracy": correct / n, "low": low, "high": high}


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

    The light recipe trains against one step (Debenedetti et al. 2023, arXiv:2209.07399); if the loss keeps rising with
    more, the shorter attack misleads: `loss_gap` is |L_k − L_K| / L_K, where L_k is the mean cross-entropy under k
    steps and K the longest attack. Each model's folder holds summary.csv, as the paper's attack_effectiveness.py.

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
            yield {
                "key": key,
                "epoch": epoch,
                "steps": length,
                "seed": seed,
                "eps": eps,
                "clean_accuracy": clean.accuracy,
                **_accuracy(score.correct, score.n),
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
    place = operator.itemgetter("model", "epoch", "seed", "eps")
    ends = {place(row): row["adv_loss"] for row in rows if row["steps"] == longest}
    gaps = [(row, ends.get(place(row))) for row in rows]
    return [{**row, "loss_gap": abs(row["adv_loss"] - end) / end if end else None} for row, end in gaps]


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


def draw_effectiveness(rows: list[Row]) -> Figure:
    """Loss gap and accuracy: a panel of each per model against the epoch as in the paper, or against the steps."""
    models, steps = names(rows), sorted(names(rows, "steps"))
    by_epoch = any(row["epoch"] is not None for row in rows)
    columns, x = (models, "epoch") if by_epoch else ([""], "steps")
    with figure_style():
        size = (1.2 + 4.2 * len(columns), 5.6) if by_epoch else (9.2, 3.3)
        figure = Figure(figsize=size, layout="constrained")
        shape = (2, len(columns)) if by_epoch else (1, 2)
        shared: Any = {"sharex": "col", "sharey": "row"} if by_epoch else {}
        grid = figure.subplots(*shape, squeeze=False, **shared).reshape(2, -1)
        for place, column in enumerate(columns):
            grid[0, place].set_title(column)
            for index, line in enumerate(steps if by_epoch else models):
                wanted = {"model": column, "steps": line} if by_epoch else {"model": line}
                shown = [row for row in rows if wanted.items() <= row.items()]
                for axes, name in zip(grid[:, place], ("loss_gap", "accuracy"), strict=True):
                    if points := gather(shown, x, name):
                        percent = {at: spread([100 * value for value in values]) for at, values in points.items()}
                        draw_line(axes, index, f"PGD-{line}" if by_epoch else line, percent)
        grid[0, 0].set_ylabel(f"|L_k − L_{steps[-1]}| / L_{steps[-1]}, %")
        grid[1, 0].set_ylabel("accuracy, %")
        for axes in grid[-1] if by_epoch else grid.flatten():
            axes.set_xlabel("epoch" if by_epoch else "steps of PGD")
            if by_epoch:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            else:
                axes.set_xscale("log")
                axes.set_xticks(steps, [str(step) for step in steps])
                axes.minorticks_off()
        legend_below(figure, columns=5 if by_epoch else 3)
    return figure


@studies.register("attack-convergence")
def attack_convergence(
    subject: Subject,
    done: set[str],
    *,
    eps: float = 4 / 255,
    steps: int | tuple[int, ...] = CONVERGENCE,
    seeds: tuple[int, ...] = tuple(range(20)),
    points: int = 100,
    step_size: float | None = None,
    seed: int | None = None,
    norm: Norm = LINF,
) -> Iterator[Row]:
    """Loss of single, correctly classified points after 0, 1, 2, … steps of PGD; `steps=N` is every step up to N.

    As in the light recipe (arXiv:2209.07399) steps have one length, 0.15 ε, whatever their number: an attack of k steps
    is the beginning of the longest one, and one ascent per seed answers for all of them.

    eps: radius of the attack, in pixels of images in [0, 1].
    steps: numbers of steps that are told, or N for every step up to N.
    seeds: of the random starts.
    points: correctly classified images, at most.
    step_size: in pixels; null: 0.15 eps.
    seed: one seed instead of `seeds`; null: those.
    norm: of the ball: linf, l2 or l1.
    """
    lengths = sorted(set(range(steps + 1) if isinstance(steps, int) else steps))
    if not lengths or lengths[0] < 0:
        raise ConfigError(f"study attack-convergence: steps={steps} is not a list of whole numbers that are 0 or more.")
    check_count(points, "points")
    step = STEP * eps if step_size is None else step_size
    for one in seeds if seed is None else (seed,):
        attack = PGD(eps=eps, steps=max(max(lengths), 1), step_size=step, seed=one, norm=norm)
        yield from sorted(_ascend(subject, attack, points, lengths, done), key=lambda row: row["steps"])


def _ascend(subject: Subject, attack: PGD, points: int, lengths: list[int], done: set[str]) -> Iterator[Row]:
    """One long ascent on the first images that the model classifies correctly, told at the wanted numbers of steps."""
    seen = found = 0
    with torch.no_grad(), frozen(subject.model):
        for x, y, ids in subject.with_ids():
            right = (subject.model(x).argmax(1) == y).nonzero().flatten()[: points - found]
            places = (seen + right).tolist()
            seen, found = seen + len(y), found + len(right)
            keys = {(step, place): f"{attack.seed}/{step}/{place}" for step in lengths for place in places}
            if set(keys.values()) <= done:
                continue
            x, y = x[right], y[right]
            start = attack.start(x, attack.dice(ids.to(x.device)[right]))
            for step, (point, here) in enumerate(attack.ascend(subject.model, x, y, start)):
                subject.progress(step, attack.steps, f"step {step} of {attack.steps}")
                if step not in lengths:
                    continue
                logits = full_precision(subject.model(point)) if here is None else here.logits
                losses, correct = attack.objective(logits, y).double().tolist(), (logits.argmax(1) == y).int().tolist()
                for place, loss, one in zip(places, losses, correct, strict=True):
                    if keys[step, place] not in done:
                        row = {"key": keys[step, place], "point": place, "seed": attack.seed, "steps": step}
                        yield {**row, "eps": attack.eps, "loss": loss, "correct": one}
    if not found:
        raise DataError(
            f"{subject.name} classifies none of {seen} images correctly, so there is nothing to attack; "
            "is it trained, and for these classes?"
        )


def draw_convergence(rows: list[Row]) -> Figure:
    """Mean loss against the steps: a dark band over seeds, a light one (quartiles) over points."""
    steps = sorted(names(rows, "steps"))
    with figure_style():
        figure, axes = new_axes()
        for index, model in enumerate(names(rows)):
            own = [row for row in rows if row["model"] == model]
            draw_line(axes, index, model, {step: spread(_means(own, "seed", step)) for step in steps}, alpha=0.4)
            draw_line(axes, index, model, {step: _quartiles(_means(own, "point", step)) for step in steps}, alpha=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(steps) <= 12 and steps != list(range(len(steps))):  # a list, spread over orders of magnitude
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(steps, [str(step) for step in steps])
            axes.minorticks_off()
        axes.set_xlabel("steps of PGD")
        axes.set_ylabel("cross-entropy (nats)")
        legend_below(figure)
    return figure


def _means(rows: list[Row], column: str, step: int) -> list[float]:
    """The mean loss after `step` steps for each seed, or each point."""
    groups = gather((row for row in rows if row["steps"] == step), column, "loss")
    return [statistics.mean(values) for values in groups.values()]


def _quartiles(values: list[float]) -> Band:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    return low, statistics.mean(values), high


@studies.register("eps-sweep")
def eps_sweep(
    subject: Subject,
    done: set[str],
    *,
    eps: tuple[float, ...] = (1 / 255, 2 / 255, 3 / 255, 4 / 255, 5 / 255, 6 / 255),
    threat: str | None = None,
    steps: int | None = None,
    space: Space = "pixels",
    seed: int = 0,
) -> Iterator[Row]:
    """Accuracy under an attack of growing strength: `threat` (autoattack, square:…), or the KPCA scripts' PGD.

    eps: radii, in pixels of images in [0, 1].
    threat: an attack with settings; its eps is each of those in turn; null: the KPCA scripts' PGD.
    steps: of that PGD; null: 20. Fewer than ten take PGD's own, longer step.
    space: pixels, or that of normalised images as the KPCA scripts counted: ε in standard deviations, nothing clipped.
    seed: of the attack.
    """
    made = [_make(threat, strength, steps, space, seed) for strength in eps]
    for strength, attack in zip(eps, made, strict=True):
        key = f"{space}/{strength:.6g}"
        if key in done:
            continue
        if isinstance(attack, PGD) and space == "normalised":
            answers, truth, _ = attacked_answers(subject, attack, space, "true")
            correct, n, loss = int((answers == truth).sum()), len(truth), None
        else:
            score = evaluate(subject.model, subject, [attack], progress=subject.progress).threats[-1]
            correct, n, loss = score.correct, score.n, score.loss
        row = {"key": key, "space": space, "threat": describe(attack), "eps": strength}
        yield {**row, **_accuracy(correct, n), "adv_loss": loss, "n": n}


def _make(threat: str | None, eps: float, steps: int | None, space: Space, seed: int) -> Threat:
    """The attack of one strength; settings that contradict each other, and threats that have no ε, are refused."""
    if threat is None:
        steps = STEPS if steps is None else steps
        step = STEP * eps if steps >= CROSSING else None
        return PGD(eps=eps, steps=steps, step_size=step, seed=seed, bounds=BOUNDS[space])
    name, settings = read_spec(threat, where="threat")
    attacks.get(name, where="threat")
    if "eps" in settings:
        raise ConfigError(f"threat={threat!r} says eps, which is what the study varies: give eps=[…] beside it.")
    if steps is not None:
        raise ConfigError(f"steps={steps} is a setting of the attack: write it into threat={threat!r}, or leave it.")
    if space == "normalised":
        raise ConfigError("space=normalised means the KPCA scripts' PGD; leave threat out, or use space=pixels.")
    return make_threat({"use": name, **({"seed": seed} if seed else {}), **settings, "eps": eps}, where="threat")


def draw_sweep(rows: list[Row]) -> Figure:
    """Accuracy against ε, one line per model and space."""
    with figure_style():
        figure, axes = new_axes()
        for index, kind in enumerate(dict.fromkeys((row["model"], row["space"]) for row in rows)):
            own = (row for row in rows if (row["model"], row["space"]) == kind)
            draw_accuracy(axes, index, f"{kind[0]} ({kind[1]})", own)
        axes.set_xlabel("ε × 255")
        axes.set_ylabel("accuracy, %")
        legend_below(figure, columns=2)
    return figure


@studies.register("released-protocol")
def released_protocol(
    subject: Subject,
    done: set[str],
    *,
    eps: tuple[float, ...] = (1 / 255, 2 / 255, 4 / 255, 6 / 255),
    threat: Literal["pgd", "fgsm"] = "pgd",
    steps: int | None = None,
    spaces: tuple[Space, ...] = ("pixels", "normalised"),
    labels: tuple[Labels, ...] = ("true", "predicted"),
    seed: int = 0,
) -> Iterator[Row]:
    """Accuracy under PGD or FGSM in pixels and normalised units, against true and predicted labels; answers are kept.

    The KPCA paper's code (arXiv:2406.13762) attacks images that are normalised already: ε counts standard deviations
    and nothing is clipped, so its "1/255" is about 0.225/255 in pixels. It gives the attack no labels: the answer of
    the model stands for the truth, so an image that was wrong may be pushed into the right class. Answers are always
    compared with the true labels.

    eps: radii; in pixels of images in [0, 1], or in standard deviations where the space is normalised.
    threat: pgd, or fgsm from the image itself.
    steps: of pgd, each of 0.15 eps; null: 20.
    spaces: of pixels, normalised; the released code has the latter.
    labels: of true, predicted; the released code has the latter.
    seed: of the random starts.
    """
    if threat == "fgsm" and steps is not None:
        raise ConfigError(f"steps={steps} is a setting of pgd; fgsm makes one step. Leave it out.")
    for strength, space, told in product(eps, spaces, labels):
        key = f"{space}/{told}/{strength:.6g}"
        if key in done:
            continue
        attack: Attack = FGSM(eps=strength, bounds=BOUNDS[space])
        if threat == "pgd":
            attack = PGD(eps=strength, steps=steps or STEPS, step_size=STEP * strength, seed=seed, bounds=BOUNDS[space])
        answers, truth, ids = attacked_answers(subject, attack, space, told)
        right = answers == truth
        file = subject.folder / "answers" / f"{key.replace('/', '_')}.safetensors"  # to compare models image by image
        save_tensors(file, {"id": ids, "prediction": answers, "correct": right}, {"key": key})
        row = {"key": key, "space": space, "labels": told, "eps": strength}
        yield {**row, **_accuracy(int(right.sum()), len(right)), "n": len(right)}


@torch.no_grad()
def attacked_answers(subject: Subject, attack: Attack, space: str, labels: str) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) classes of the attacked images, true classes, and ids, on the CPU."""
    pixels = subject.model
    found = []
    for x, y, ids in subject.with_ids():
        model, images = (pixels.model, (x - pixels.mean) / pixels.std) if space == "normalised" else (pixels, x)
        target = model(images).argmax(1) if labels == "predicted" else y
        moved = attack(model, images, target, ids=ids, progress=subject.progress)
        found.append((model(moved).argmax(1).cpu(), y.cpu(), ids.cpu()))
    answers, truth, ids = (torch.cat(column) for column in zip(*found, strict=True))
    return answers, truth, ids


def draw_protocols(rows: list[Row]) -> Figure:
    """Accuracy against ε, a panel for each space and kind of labels, one line per model."""
    ways = list(dict.fromkeys((row["space"], row["labels"]) for row in rows))
    titles = [f"{space}, {labels} labels" for space, labels in ways]
    with figure_style():
        figure, every = panels(titles, 2, (3.4, 2.4), (0.8, 0.9), sharex=True, sharey=True)
        for axes, way in zip(every, ways, strict=True):
            own = [row for row in rows if (row["space"], row["labels"]) == way]
            for index, model in enumerate(names(own)):
                draw_accuracy(axes, index, model, (row for row in own if row["model"] == model))
        for axes in every[-2:]:
            axes.set_xlabel("ε × 255, in units of its space")
        for axes in every[::2]:
            axes.set_ylabel("accuracy, %")
        legend_below(figure, columns=min(2, len(ways)))
    return figure


attack_effectiveness.draw = draw_effectiveness
attack_effectiveness.finish = add_loss_gap
attack_effectiveness.further = write_summaries
attack_convergence.draw = draw_convergence
eps_sweep.draw = draw_sweep
released_protocol.draw = draw_protocols
