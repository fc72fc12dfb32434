"""When has an attack converged? The loss of every correctly classified point after each number of steps, × seeds.

As in the light recipe (Debenedetti et al. 2023, arXiv:2209.07399): steps of one fixed length, 0.15 ε, whatever their
number. So an attack of k steps is the beginning of the longest one, and one ascent per seed answers for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError, DataError
from vitruvius._style import figure_style, legend_below, new_axes
from vitruvius.attacks.base import LINF, Norm, frozen, full_precision
from vitruvius.attacks.pgd import PGD
from vitruvius.studies._base import Row, Subject, studies
from vitruvius.studies._figures import Band, draw_line, gather, names, spread

STEPS = (0, 1, 2, 5, 10, 50, 100, 200, 500)


@studies.register("attack-convergence")
def attack_convergence(
    subject: Subject,
    done: set[str],
    *,
    eps: float = 4 / 255,
    steps: int | tuple[int, ...] = STEPS,
    seeds: tuple[int, ...] = tuple(range(20)),
    points: int = 100,
    step_size: float | None = None,
    seed: int | None = None,
    norm: Norm = LINF,
) -> Iterator[Row]:
    """Loss of single, correctly classified points after 0, 1, 2, … steps of PGD; `steps=N` is every step up to N.

    subject: a model and the images it is studied on.
    done: keys of the rows that are there already.
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
    step = 0.15 * eps if step_size is None else step_size
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


def draw(rows: list[Row]) -> Figure:
    """Mean loss of all `rows` against the steps: a dark band over seeds, a light one (quartiles) over points."""
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


attack_convergence.draw = draw
