"""One ascent of Auto-PGD for many images, each at its own iteration (Croce & Hein 2020, arXiv:2003.01690, algorithm 1).

Steps start at 2 eps and are halved at checkpoints where the loss has not risen often enough or not improved.
B images, K classes; image-shaped tensors are (B, C, H, W).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks._norms import LINF, Norm, per_image
from vitruvius.attacks._views.compiled import CompiledStep

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (B, K), label (B,), target (B,) → loss (B,)
MOMENTUM = 0.25
REQUIRED_RISES = 0.75  # share of the steps between checkpoints that must raise the loss


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

    def advance(self, model: Callable[[Tensor], Tensor], s: AscentState) -> AscentState:
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
