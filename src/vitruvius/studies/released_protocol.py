"""What did the protocol do? Attacks as the KPCA paper's released code ran them, and with both of its choices undone.

That code (arXiv:2406.13762) attacks images that are normalised already: ε counts standard deviations and nothing is
clipped to the image, so its "1/255" is about 0.225/255 in pixels. And it gives the attack no labels: the answer of the
model stands for the truth, so an image that was wrong may be pushed into the right class. PGD makes twenty steps of
0.15 ε from a random start, FGSM one of ε from the image, as there. Answers are always compared with the true labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._files import save_tensors
from vitruvius._style import figure_style, legend_below
from vitruvius.attacks.base import Attack
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation.result import wilson
from vitruvius.studies._base import Row, Subject, studies
from vitruvius.studies._figures import draw_accuracy, names, panels

Space = Literal["pixels", "normalised"]
Labels = Literal["true", "predicted"]
BOUNDS = {"pixels": (0.0, 1.0), "normalised": (-torch.inf, torch.inf)}  # not clipped, as in the released code
STEPS = 20
STEP = 0.15  # of ε


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

    subject: a model and the images it is studied on.
    done: keys of the rows that are there already.
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
        low, high = wilson(int(right.sum()), len(right))
        accuracy = float(right.double().mean())
        row = {"key": key, "space": space, "labels": told, "eps": strength, "accuracy": accuracy}
        yield {**row, "low": low, "high": high, "n": len(right)}


@torch.no_grad()
def attacked_answers(subject: Subject, attack: Attack, space: str, labels: str) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) classes of the attacked images of a `subject`, true classes, and ids, on the CPU.

    `attack` is made in the `space` of pixels or of normalised images, against `labels` that are true or predicted.
    """
    pixels = subject.model
    found = []
    for x, y, ids in subject.with_ids():
        model, images = (pixels.model, (x - pixels.mean) / pixels.std) if space == "normalised" else (pixels, x)
        target = model(images).argmax(1) if labels == "predicted" else y
        moved = attack(model, images, target, ids=ids, progress=subject.progress)
        found.append((model(moved).argmax(1).cpu(), y.cpu(), ids.cpu()))
    answers, truth, ids = (torch.cat(column) for column in zip(*found, strict=True))
    return answers, truth, ids


def draw(rows: list[Row]) -> Figure:
    """Accuracy of all `rows` against ε, a panel for each space and kind of labels, one line per model."""
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


released_protocol.draw = draw
