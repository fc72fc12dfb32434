"""When has an attack converged? The loss of every correctly classified point after each number of steps, × seeds.

As in the light recipe (Debenedetti et al. 2023, arXiv:2209.07399): steps of one fixed length, 0.15 ε, whatever their
number. So an attack of k steps is the beginning of the longest one, and one ascent per seed answers for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError, DataError
from vitruvius.attacks.base import LINF, Norm, frozen, full_precision
from vitruvius.attacks.pgd import PGD
from vitruvius.report.style import Series, figure_style, legend_below, new_axes, series
from vitruvius.studies._base import Row, Subject, studies

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
    lengths = _lengths(steps)
    if seed is not None:
        seeds = (seed,)
    if step_size is None:
        step_size = 0.15 * eps
    check_count(points, "points")
    chosen = _correct_points(subject, points)
    for one in seeds:
        keys = {f"{one}/{length}/{int(point)}" for length in lengths for point in chosen}
        if keys <= done:
            continue
        attack = PGD(eps=eps, steps=max(max(lengths), 1), step_size=step_size, seed=one, norm=norm)
        for length, losses, correct in _ascend(subject, attack, chosen, lengths):
            for point, loss, right in zip(chosen.tolist(), losses.tolist(), correct.tolist(), strict=True):
                key = f"{one}/{length}/{point}"
                if key not in done:
                    row = {"key": key, "point": point, "seed": one, "steps": length, "eps": eps}
                    yield {**row, "loss": loss, "correct": int(right)}


def _lengths(steps: int | Sequence[int]) -> list[int]:
    if isinstance(steps, int):
        steps = range(steps + 1)
    lengths = sorted(set(steps))
    if not lengths or lengths[0] < 0:
        raise ConfigError(f"study attack-convergence: steps={steps} is not a list of whole numbers that are 0 or more.")
    return lengths


@torch.no_grad()
def _correct_points(subject: Subject, points: int) -> Tensor:
    """Places of the first images that the model classifies correctly, (P,)."""
    right = torch.cat([subject.model(x).argmax(1) == y for x, y, _ in subject.batches()])
    places = right.nonzero().flatten()[:points].cpu()
    if not len(places):
        raise DataError(
            f"{subject.name} classifies none of {len(right)} images correctly, so there is nothing to attack; "
            "is it trained, and for these classes?"
        )
    return places


def _ascend(
    subject: Subject, attack: PGD, places: Tensor, lengths: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(steps, losses (P,), whether still correct (P,)) for every wanted number of steps of one long ascent."""
    losses: dict[int, list[Tensor]] = {length: [] for length in lengths}
    correct: dict[int, list[Tensor]] = {length: [] for length in lengths}
    with torch.no_grad(), frozen(subject.model):
        for part in places.split(subject.batch_size):
            x = subject.x[part]
            y = subject.y[part]
            start = attack.start(x, attack.dice(subject.ids[part].to(x.device)))
            for step, (point, here) in enumerate(attack.ascend(subject.model, x, y, start)):
                subject.progress(step, attack.steps, f"step {step} of {attack.steps}")
                if step not in losses:
                    continue
                if here is None:
                    logits = full_precision(subject.model(point))
                else:
                    logits = here.logits
                losses[step].append(attack.objective(logits, y).double().cpu())
                correct[step].append((logits.argmax(1) == y).cpu())
    for length in lengths:
        yield length, torch.cat(losses[length]), torch.cat(correct[length])


def draw(rows: list[Row]) -> Figure:
    """Mean loss against the steps, one line per model: a dark band over seeds, a light one (quartiles) over points.

    `rows` are those of all models.
    """
    with figure_style():
        figure, axes = new_axes()
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            _draw_model(axes, series(index), model, [row for row in rows if row["model"] == model])
        steps = sorted({row["steps"] for row in rows})
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(steps) <= 12 and steps != list(range(len(steps))):  # a list, spread over orders of magnitude
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(steps, [str(step) for step in steps])
            axes.minorticks_off()
        axes.set_xlabel("steps of PGD")
        axes.set_ylabel("cross-entropy (nats)")
        legend_below(figure)
    return figure


def _draw_model(axes: Axes, look: Series, model: str, rows: list[Row]) -> None:
    steps = sorted({int(row["steps"]) for row in rows})
    by_seed = [_means_by(rows, "seed", step) for step in steps]
    by_point = [_means_by(rows, "point", step) for step in steps]
    means = [statistics.mean(values) for values in by_seed]
    axes.plot(steps, means, marker=look.marker, color=look.colour, label=model)
    _draw_band(axes, steps, [(min(values), max(values)) for values in by_seed], look, alpha=0.4)
    _draw_band(axes, steps, [_quartiles(values) for values in by_point], look, alpha=0.12)


def _draw_band(axes: Axes, steps: list[int], ends: list[tuple[float, float]], look: Series, *, alpha: float) -> None:
    lows = [low for low, _ in ends]
    highs = [high for _, high in ends]
    axes.fill_between(steps, lows, highs, color=look.colour, alpha=alpha, linewidth=0)


def _means_by(rows: list[Row], column: str, step: int) -> list[float]:
    """The mean loss after `step` steps for each seed, or each point."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row["steps"] == step:
            groups.setdefault(row[column], []).append(row["loss"])
    return [statistics.mean(values) for values in groups.values()]


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


attack_convergence.draw = draw
