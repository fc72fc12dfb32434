"""What the Auto-PGD attacks share: one ascent in Linf or L2, and attempts on the images that are not fooled yet.

Croce & Hein 2020, arXiv:2003.01690, algorithm 1. Steps start at 2 eps and are halved at checkpoints where the loss has
not risen often enough or not improved. The ascent in L1 is in `_auto_pgd_l1`. B images, each at its own iteration; K
classes; N images of one attempt; image-shaped tensors are (B, C, H, W).
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._progress import Progress, part_of
from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import SparseAscent
from vitruvius.attacks._batching import BestSoFar, attempts_in_turn, search_in_batches
from vitruvius.attacks._compiled import CompiledStep
from vitruvius.attacks._models import Searched, full_precision, loss_and_grad, progress_of
from vitruvius.attacks.base import Attack, Cost, Model, attacks
from vitruvius.attacks.losses import CE, KL, Loss, Objective, hard_labels
from vitruvius.attacks.norms import LINF, Norm, per_image

MOMENTUM = 0.25
REQUIRED_RISES = 0.75  # share of the steps between checkpoints that must raise the loss


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Attack):
    """Auto-PGD with a loss and targets still to be named."""

    steps: int = 100
    restarts: int = 1
    eot_iterations: int = 1  # passes averaged for each gradient, for models that are random
    batch_size: int | None = None  # images searched at once; default all
    compile: bool = False  # the model, and the bookkeeping of linf and l2, by torch.compile
    precision: str = "exact"

    @abstractmethod
    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """What is maximised, (B,)."""

    def targets_of(self, model: Model, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        """Classes (B,) to aim at, one after the other; the labels where the loss has no target."""
        return [y]

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        """Attempt after attempt, from `start` where one is given, else from random points.

        Several attempts run side by side where so few images are left that they fit into one batch.
        """
        y = hard_labels(y)
        best = BestSoFar(x)
        size, made = self.batch_size or len(x), 0
        targets = self.targets_of(model, x, y)
        for rows, chunk, more, words in attempts_in_turn(targets, self.restarts, size, best.not_fooled):
            many = rows.repeat(len(chunk))
            target = torch.cat([attempt.target[rows] for attempt in chunk])
            numbers = rows.new_tensor([attempt.number for attempt in chunk]).repeat_interleave(len(rows))
            begin = None if start is None else start[many]
            most = math.ceil(len(many) / size) * sum(ascent.steps + 1 for ascent in self._ascents(begin))
            progress = part_of(progress_of(model), made, more * most, words)
            ends, steps = self._ascend(model, x[many], y[many], target, dice[many], numbers, begin, progress)
            made += steps
            best.offer_attempts(rows, ends.point, ends.fooled, ends.loss)
        return best.x

    def cost(self) -> Cost:
        """The start of every ascent is looked at too; in L1 an attempt has three."""
        cost = super().cost()
        attempts = cost.steps // self.steps
        return cost._replace(steps=attempts * sum(ascent.steps + 1 for ascent in self._ascents(None)))

    def refine(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once per target, all from the worst point known."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice, start)

    def _ascend(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        dice: Dice,
        number: Tensor,
        start: Tensor | None,
        progress: Progress,
    ) -> tuple[Ends, int]:
        """One ascent; in L1 several, each from where the last one ended. Also how many steps of a batch were made.

        In a faster view of a model, an ascent continues until the model itself is fooled.
        """
        verifier = model.verifier if isinstance(model, Searched) else None
        ends = Ends(x.clone(), x.clone(), x.new_zeros(len(x)), y.new_zeros(len(x), dtype=torch.bool))
        every = torch.arange(len(x), device=x.device)

        def ascend(rules: Ascent | SparseAscent, before: Tensor | None, progress: Progress) -> int:
            def begin(rows: Tensor) -> Any:
                if before is None:
                    first = rules.start(x[rows], dice[rows], number[rows])
                else:
                    first = rules.restart(x[rows], before[rows])
                return rules.begin(x[rows], y[rows], target[rows], first)

            def finish(rows: Tensor, end: Any) -> Tensor:
                fooled = end.fooled
                if verifier is not None:
                    fooled = fooled & (end.iteration <= rules.steps)  # the view's last step is not confirmed
                ends.point[rows] = torch.where(per_image(end.fooled, x), end.seen, end.best)
                ends.best[rows] = end.best
                ends.loss[rows] = end.best_loss.to(ends.loss)  # of a model that answers in float64
                ends.fooled[rows] = fooled
                return fooled

            confirm = None if verifier is None else partial(_confirmed, verifier, rules.steps)
            advance, steps = partial(rules.advance, model), rules.steps + 1
            return search_in_batches(
                every, begin, advance, finish, self.batch_size, confirm, steps=steps, progress=progress
            )

        ascents = self._ascents(start)
        turns = math.ceil(len(x) / (self.batch_size or len(x)))
        made = 0
        for place, rules in enumerate(ascents):
            later = turns * sum(further.steps + 1 for further in ascents[place + 1 :])
            made += ascend(rules, ends.best if place else start, part_of(progress, made, later))
        return ends, made

    def _ascents(self, start: Tensor | None) -> Sequence[Ascent | SparseAscent]:
        """One; in L1 three, in balls of 3, 2 and 1 times the radius, of which only the last may stop early.

        Where a `start` is given, it is good already, so only the last one is made.
        """
        if self.norm.name != "l1":
            return [Ascent(self.norm, self.eps, self.steps, self.objective, self.eot_iterations, compiled=self.compile)]
        third = 0 if start is not None else int(0.3 * self.steps)
        rules = SparseAscent(self.eps, third, self.objective, self.eot_iterations, stops=False, fresh=False)
        last = rules._replace(steps=self.steps - 2 * third, stops=True)
        if start is not None:
            return [last]
        return [rules._replace(eps=3 * self.eps, fresh=True), rules._replace(eps=2 * self.eps), last]


@attacks.register("apgd")
@dataclass(frozen=True, kw_only=True)
class APGD(AutoPGD):
    """Auto-PGD: gradient ascent with momentum that halves its steps by itself; ce, dlr or margin loss.

    Settings beside eps, norm and seed:
    `steps`: of an ascent.
    `restarts`: ascents from random points, on the images that are not fooled yet.
    `eot_iterations`: passes averaged for each gradient, for models that are random.
    `loss`: ce, dlr or margin.
    `batch_size`: images searched at once; default all.
    `compile`: the model, and the bookkeeping in linf and l2, by torch.compile.
    `precision`: of the search: exact, fast or auto, as for autoattack.
    """

    loss: Loss = CE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == KL:
            raise ConfigError("APGD with loss=kl; expected ce, dlr or margin, which compare with labels.")

    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, y)

    def _name_of_dice(self) -> str:
        return f"apgd-{self.loss}"


class Ends(NamedTuple):
    """Where N ascents ended."""

    point: Tensor  # that fools the model, else of highest loss
    best: Tensor  # of highest loss
    loss: Tensor  # (N,) the highest
    fooled: Tensor  # (N,) bool


def _confirmed(verifier: Model, steps: int, state: Any) -> Tensor:
    """(B,) bool, on the CPU: who is done, except those with steps left that have not fooled the verifier."""
    done = state.done.cpu()
    claims = (state.done & state.fooled & (state.iteration <= steps)).nonzero().squeeze(1)
    if len(claims):
        fooled = full_precision(verifier(state.seen[claims])).argmax(1) != state.y[claims]
        done[claims.cpu()] = fooled.cpu()
    return done


class AscentState(NamedTuple):
    """How far the ascents of B images have come."""

    x: Tensor
    low: Tensor  # least and largest pixels allowed, in Linf those of the ball too
    high: Tensor
    y: Tensor  # (B,)
    target: Tensor  # (B,) class that targeted losses aim at
    point: Tensor  # evaluated next
    seen: Tensor  # evaluated last
    previous: Tensor  # the point the last step left from
    best: Tensor  # of highest loss
    best_grad: Tensor
    best_loss: Tensor  # (B,)
    checked_loss: Tensor  # (B,) best loss at the last checkpoint
    last_loss: Tensor  # (B,)
    rises: Tensor  # (B,) steps that raised the loss since the last checkpoint
    reduced: Tensor  # (B,) bool: the step was halved at the last checkpoint
    step: Tensor  # (B,)
    iteration: Tensor  # (B,) steps made
    fooled: Tensor  # (B,) bool: misclassified at `seen`
    done: Tensor  # (B,) bool


class Ascent(NamedTuple):
    """The rules of an ascent of some length in a ball."""

    norm: Norm
    eps: float
    steps: int
    objective: Objective
    passes: int = 1  # of the model, averaged, where it is random
    stops: bool = True  # as soon as the model is fooled
    compiled: bool = False  # bookkeeping by torch.compile

    def start(self, x: Tensor, dice: Dice, run: int | Tensor) -> Tensor:
        """A random point on the surface of the ball."""
        delta = self.norm.random(x, self.eps, dice, run)
        return x + self.eps * delta / per_image(self.norm.length(delta).clamp(min=1e-12), x)

    def restart(self, x: Tensor, point: Tensor) -> Tensor:
        """The point of this ball nearest to one of another ball."""
        return project(point, x, *self.limits(x), self.norm, self.eps)

    def limits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Least and largest pixels: those of ball and image in Linf, those of the image (B, 1, 1, 1) elsewhere."""
        if self.norm == LINF:
            return (x - self.eps).clamp(min=0), (x + self.eps).clamp(max=1)
        return per_image(x.new_zeros(len(x)), x), per_image(x.new_ones(len(x)), x)

    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> AscentState:
        """Ascents at their start, not yet evaluated."""
        start = start.clamp(0, 1)
        low, high = self.limits(x)
        zero = x.new_zeros(len(x))
        off = y.new_zeros(len(x), dtype=torch.bool)
        return AscentState(
            x=x, low=low, high=high, y=y, target=target,
            point=start, seen=start, previous=start, best=start, best_grad=torch.zeros_like(x),
            best_loss=zero - torch.inf, checked_loss=zero - torch.inf, last_loss=zero,
            rises=zero, reduced=~off, step=zero + 2 * self.eps, iteration=torch.zeros_like(y), fooled=off, done=off,
        )  # fmt: skip

    def advance(self, model: Model, s: AscentState) -> AscentState:
        """Evaluate the points and make a step."""
        logits, loss, grad = loss_and_grad(
            model, s.point, lambda logits: self.objective(logits, s.y, s.target), self.passes
        )
        fooled = logits.argmax(1) != s.y
        windows = checkpoints(self.steps, s.y.device)
        if self.compiled:
            return take_step_compiled(s, fooled, loss, grad, windows, self.norm, self.eps, self.stops)
        return take_step(s, fooled, loss, grad, windows, self.norm, self.eps, self.stops)


def take_step(
    s: AscentState, fooled: Tensor, loss: Tensor, grad: Tensor, windows: Tensor, norm: Norm, eps: float, stops: bool
) -> AscentState:
    """Record what was seen, look back where a checkpoint is due, and move on."""
    s = _record_best(s, fooled, loss, grad, stops, last=len(windows) - 2)
    s, grad = _look_back(s, grad, windows[s.iteration])
    return _move(s, grad, norm, eps)


def _record_best(s: AscentState, fooled: Tensor, loss: Tensor, grad: Tensor, stops: bool, last: int) -> AscentState:
    first = s.iteration == 0
    better = loss > s.best_loss
    return change(
        s,
        seen=s.point,
        best=torch.where(per_image(better, s.x), s.point, s.best),
        best_grad=torch.where(per_image(better, s.x), grad, s.best_grad),
        best_loss=torch.where(better, loss, s.best_loss),
        checked_loss=torch.where(first, loss, s.checked_loss),
        rises=s.rises + (~first & (loss > s.last_loss)),
        last_loss=torch.where(first, 0.0, loss),  # the released code compares the first step with 0
        fooled=fooled,
        done=(fooled & stops) | (s.iteration >= last),
    )


def _look_back(s: AscentState, grad: Tensor, window: Tensor) -> tuple[AscentState, Tensor]:
    """At a checkpoint, halve the step and go back to the best point where the ascent has stalled.

    `window` (B,) is the number of steps a checkpoint looks back on, 0 where none is due.
    """
    due = window > 0
    stalled = (s.rises <= REQUIRED_RISES * window) | (~s.reduced & (s.checked_loss >= s.best_loss))
    back = due & stalled
    moved = change(
        s,
        point=torch.where(per_image(back, s.x), s.best, s.point),
        step=torch.where(back, s.step / 2, s.step),
        reduced=torch.where(due, stalled, s.reduced),
        checked_loss=torch.where(due, s.best_loss, s.checked_loss),
        rises=torch.where(due, 0.0, s.rises),
    )
    return moved, torch.where(per_image(back, s.x), s.best_grad, grad)


def _move(s: AscentState, grad: Tensor, norm: Norm, eps: float) -> AscentState:
    """Step along the gradient, project, add momentum, project."""
    inertia = per_image(torch.where(s.iteration == 0, 0.0, MOMENTUM).to(s.x.dtype), s.x)
    stepped = s.point + per_image(s.step, s.x) * norm.steepest(grad)
    stepped = project(stepped, s.x, s.low, s.high, norm, eps)
    pulled = s.point + (1 - inertia) * (stepped - s.point) + inertia * (s.point - s.previous)
    point = project(pulled, s.x, s.low, s.high, norm, eps)
    return change(s, previous=s.point, point=point, iteration=s.iteration + 1)


def project(point: Tensor, x: Tensor, low: Tensor, high: Tensor, norm: Norm, eps: float) -> Tensor:
    """The point, brought into ball and image."""
    if norm != LINF:
        point = x + norm.project(point - x, eps)
    return point.clamp(low, high)


def change(s: AscentState, **fields: Tensor) -> AscentState:
    """The state with some fields replaced; `_replace`, which torch.compile does not follow in every version."""
    return AscentState(*(fields.get(name, value) for name, value in zip(AscentState._fields, s, strict=True)))


take_step_compiled = CompiledStep(take_step)


@functools.lru_cache
def checkpoints(steps: int, device: torch.device) -> Tensor:
    """(steps + 2,) number of steps a checkpoint looks back on at each iteration, 0 where there is none."""
    windows = [0] * (steps + 2)
    window = max(int(0.22 * steps), 1)
    due = window
    while due <= steps:
        windows[due] = window
        window = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
        due += window
    return torch.tensor(windows, device=device)
