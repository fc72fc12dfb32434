"""What did the protocol do? PGD as the KPCA paper's released code ran it, and with each of its two choices undone.

That code (arXiv:2406.13762) attacks images that are normalised already: ε counts standard deviations and nothing is
clipped to the image, so its "1/255" is about 0.225/255 in pixels. And it gives the attack no labels: the answer of the
model stands for the truth, so an image that was wrong may be pushed into the right class. Twenty steps of 0.15 ε from
a random start, as there. Answers are always compared with the true labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._files import save_tensors
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation.result import wilson
from vitruvius.report.style import figure_style, legend_below, series
from vitruvius.studies._base import Row, Subject, studies

SPACES = ("pixels", "normalised")
LABELS = ("true", "predicted")
STEPS = 20
STEP = 0.15  # of ε


@studies.register("released-protocol")
def released_protocol(
    subject: Subject,
    done: set[str],
    *,
    eps: tuple[float, ...] = (1 / 255, 2 / 255, 4 / 255, 6 / 255),
    steps: int = STEPS,
    spaces: tuple[str, ...] = SPACES,
    labels: tuple[str, ...] = LABELS,
    seed: int = 0,
) -> Iterator[Row]:
    """Accuracy under PGD in pixels and in normalised units, against true and predicted labels; answers are kept.

    subject: a model and the images it is studied on.
    done: keys of the rows that are there already.
    eps: radii; in pixels of images in [0, 1], or in standard deviations where the space is normalised.
    steps: of the attack, each of 0.15 eps.
    spaces: of pixels, normalised; the released code has the latter.
    labels: of true, predicted; the released code has the latter.
    seed: of the random starts.
    """
    _check("spaces", spaces, SPACES)
    _check("labels", labels, LABELS)
    for strength, space, told in product(eps, spaces, labels):
        key = f"{space}/{told}/{strength:.6g}"
        if key in done:
            continue
        attack = PGD(eps=strength, steps=steps, step_size=STEP * strength, seed=seed, bounds=_bounds(space))
        answers = torch.cat([_answer(subject, attack, space, told, *batch) for batch in subject.batches()])
        right = answers == subject.y.cpu()
        _keep(subject, key, answers, right)
        low, high = wilson(int(right.sum()), len(right))
        yield {
            "key": key,
            "space": space,
            "labels": told,
            "eps": strength,
            "accuracy": float(right.double().mean()),
            "low": low,
            "high": high,
            "n": len(right),
        }


def _check(name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for one in given:
        if one not in known:
            raise ConfigError(f"{name} has {one!r}; expected {' and '.join(known)}, or one of them in a list.")


def _bounds(space: str) -> tuple[float, float]:
    """Least and largest value; normalised images are not clipped, as in the released code."""
    if space == "normalised":
        return -torch.inf, torch.inf
    return 0.0, 1.0


def _answer(subject: Subject, attack: PGD, space: str, told: str, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """(B,) classes of the attacked images, on the CPU."""
    pixels = subject.model
    model: nn.Module = pixels
    images = x
    if space == "normalised":
        model, images = pixels.model, (x - pixels.mean) / pixels.std
    with torch.no_grad():
        target = y
        if told == "predicted":
            target = model(images).argmax(1)
        moved = attack(model, images, target, ids=ids, progress=subject.progress)
        answers: Tensor = model(moved).argmax(1).cpu()
    return answers


def _keep(subject: Subject, key: str, answers: Tensor, right: Tensor) -> None:
    """The answers to single images, in answers/…, so that two models are compared image by image."""
    columns = {"id": subject.ids.cpu(), "prediction": answers, "correct": right}
    save_tensors(subject.folder / "answers" / f"{key.replace('/', '_')}.safetensors", columns, {"key": key})


def draw(rows: list[Row]) -> Figure:
    """Accuracy against ε, a panel for each space and kind of labels, one line per model.

    `rows` are those of all models.
    """
    ways = list(dict.fromkeys((row["space"], row["labels"]) for row in rows))
    columns = min(2, len(ways))
    lines = -(-len(ways) // columns)
    with figure_style():
        figure = Figure(figsize=(0.8 + 3.4 * columns, 0.9 + 2.4 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, way in zip(panels, ways, strict=False):
            _draw_way(axes, [row for row in rows if (row["space"], row["labels"]) == way])
            axes.set_title(f"{way[0]}, {way[1]} labels")
        for axes in panels[len(ways) :]:
            axes.set_visible(False)
        for axes in panels[-columns:]:
            axes.set_xlabel("ε × 255, in units of its space")
        for axes in panels[::columns]:
            axes.set_ylabel("accuracy, %")
        legend_below(figure, columns=columns)
    return figure


def _draw_way(axes: Axes, rows: list[Row]) -> None:
    for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        own = sorted((row for row in rows if row["model"] == model), key=lambda row: float(row["eps"]))
        look = series(index)
        strengths = [255 * row["eps"] for row in own]
        lows, accuracies, highs = ([100 * row[name] for row in own] for name in ("low", "accuracy", "high"))
        axes.plot(strengths, accuracies, marker=look.marker, color=look.colour, label=model)
        axes.fill_between(strengths, lows, highs, color=look.colour, alpha=0.2, linewidth=0)


released_protocol.draw = draw
