"""How does accuracy fall with ε? Any attack at several strengths, in pixels, or as the KPCA scripts counted.

`threat=autoattack` is the light recipe's check that nothing hides: accuracy must fall to zero. The KPCA scripts attack
images that are already normalised, without clipping: their ε is a number of standard deviations, so "1/255" is about
0.225/255 in pixels and differs from channel to channel. `space=normalised` does the same with true labels, for
comparison with that paper only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from vitruvius._errors import ConfigError
from vitruvius._registry import read_spec
from vitruvius.attacks.base import attacks
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.result import wilson
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.report.style import figure_style, legend_below, new_axes, series
from vitruvius.studies._base import Row, Subject, studies

Space = Literal["pixels", "normalised"]
STEPS = 20
CROSSING = 10  # with fewer of the scripts' steps an attack could not cross the ball and would flatter the model


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

    subject: a model and the images it is studied on.
    done: keys of the rows that are there already.
    eps: radii, in pixels of images in [0, 1].
    threat: an attack with settings; its eps is each of those in turn; null: the KPCA scripts' PGD.
    steps: of that PGD; null: 20. Fewer than ten take PGD's own, longer step.
    space: pixels, or that of normalised images as the KPCA scripts counted.
    seed: of the attack.
    """
    _check_threat(threat, steps, space)
    for strength in eps:
        key = f"{space}/{strength:.6g}"
        if key in done:
            continue
        attack = _make(threat, strength, steps, space, seed)
        if space == "normalised":
            correct = _correct_normalised(subject, attack)
            loss = None
        else:
            score = evaluate(subject.model, list(subject.batches()), [attack], progress=subject.progress).threats[-1]
            correct = score.correct
            loss = score.loss
        n = len(subject.y)
        low, high = wilson(correct, n)
        yield {
            "key": key,
            "space": space,
            "threat": describe(attack),
            "eps": strength,
            "accuracy": correct / n,
            "low": low,
            "high": high,
            "adv_loss": loss,
            "n": n,
        }


def _check_threat(threat: str | None, steps: int | None, space: Space) -> None:
    """Refuse settings that contradict each other, and threats that have no ε."""
    if threat is None:
        return
    name, settings = read_spec(threat, where="threat")
    attacks.get(name, where="threat")
    if "eps" in settings:
        raise ConfigError(f"threat={threat!r} says eps, which is what the study varies: give eps=[…] beside it.")
    if steps is not None:
        raise ConfigError(f"steps={steps} is a setting of the attack: write it into threat={threat!r}, or leave it.")
    if space == "normalised":
        raise ConfigError("space=normalised means the KPCA scripts' PGD; leave threat out, or use space=pixels.")


def _make(threat: str | None, eps: float, steps: int | None, space: Space, seed: int) -> Threat:
    """The attack of one strength."""
    if steps is None:
        steps = STEPS
    if threat is not None:
        name, settings = read_spec(threat, where="threat")
        if seed:
            settings = {"seed": seed, **settings}
        return make_threat({"use": name, **settings, "eps": eps}, where="threat")
    step: float | None = None
    if steps >= CROSSING:
        step = 0.15 * eps  # the KPCA scripts' step
    bounds = (0.0, 1.0)
    if space == "normalised":
        bounds = (-torch.inf, torch.inf)
    return PGD(eps=eps, steps=steps, step_size=step, seed=seed, bounds=bounds)


def _correct_normalised(subject: Subject, attack: Any) -> int:
    """Images that stay correct when the normalised images are attacked, unclipped."""
    pixels = subject.model
    model = pixels.model
    correct = 0
    for x, y, ids in subject.batches():
        moved = attack(model, (x - pixels.mean) / pixels.std, y, ids=ids)
        with torch.no_grad():
            correct += int((model(moved).argmax(1) == y).sum())
    return correct


def draw(rows: list[Row]) -> Figure:
    """Accuracy against ε, one line per model and space.

    `rows` are those of all models.
    """
    with figure_style():
        figure, axes = new_axes()
        for index, kind in enumerate(dict.fromkeys(_kind(row) for row in rows)):
            own = [row for row in rows if _kind(row) == kind]
            own.sort(key=lambda row: float(row["eps"]))
            _draw_line(axes, own, series(index), f"{kind[0]} ({kind[1]})")
        axes.set_xlabel("ε × 255")
        axes.set_ylabel("accuracy, %")
        legend_below(figure, columns=2)
    return figure


def _kind(row: Row) -> tuple[str, str]:
    """What one line shows: a model, in pixels or in normalised units."""
    return str(row["model"]), str(row["space"])


def _draw_line(axes: Any, rows: list[Row], look: Any, label: str) -> None:
    strengths = [255 * row["eps"] for row in rows]
    lows, accuracies, highs = ([100 * row[name] for row in rows] for name in ("low", "accuracy", "high"))
    axes.plot(strengths, accuracies, marker=look.marker, color=look.colour, label=label)
    axes.fill_between(strengths, lows, highs, color=look.colour, alpha=0.2, linewidth=0)


eps_sweep.draw = draw
