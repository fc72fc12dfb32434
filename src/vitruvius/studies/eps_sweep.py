"""How does accuracy fall with ε? Any attack at several strengths, in pixels, or as the KPCA scripts counted.

`threat=autoattack` is the light recipe's check that nothing hides: accuracy must fall to zero. The KPCA scripts attack
images that are already normalised, without clipping: their ε is a number of standard deviations, so "1/255" is about
0.225/255 in pixels and differs from channel to channel. `space=normalised` does the same with true labels, for
comparison with that paper only.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from vitruvius._errors import ConfigError
from vitruvius._registry import read_spec
from vitruvius._style import figure_style, legend_below, new_axes
from vitruvius.attacks.base import attacks
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.result import wilson
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.studies._base import Row, Subject, studies
from vitruvius.studies._figures import draw_accuracy
from vitruvius.studies.released_protocol import BOUNDS, STEP, STEPS, Space, attacked_answers

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
        low, high = wilson(correct, n)
        row = {"key": key, "space": space, "threat": describe(attack), "eps": strength, "accuracy": correct / n}
        yield {**row, "low": low, "high": high, "adv_loss": loss, "n": n}


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


def draw(rows: list[Row]) -> Figure:
    """Accuracy of all `rows` against ε, one line per model and space."""
    with figure_style():
        figure, axes = new_axes()
        for index, kind in enumerate(dict.fromkeys((row["model"], row["space"]) for row in rows)):
            own = (row for row in rows if (row["model"], row["space"]) == kind)
            draw_accuracy(axes, index, f"{kind[0]} ({kind[1]})", own)
        axes.set_xlabel("ε × 255")
        axes.set_ylabel("accuracy, %")
        legend_below(figure, columns=2)
    return figure


eps_sweep.draw = draw
