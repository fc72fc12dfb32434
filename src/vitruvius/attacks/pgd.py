"""Projected gradient ascent from a random point of the ball (Madry et al. 2018; momentum: Dong et al. 2018).

The last iterate is the light recipe's (Debenedetti et al. 2023, arXiv:2209.07399), and so is the step 1.5 eps / steps
of short attacks. Beyond six steps it is too cautious: it overstates robustness by 2 to 8 points against eps / 4 (10 and
20 steps, the classifiers of the golden files), since an ascent must be able to cross the ball several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._batching import BestSoFar
from vitruvius.attacks._models import LossAndGrad, full_precision, loss_and_grad, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, Loss, hard_labels
from vitruvius.attacks.norms import L1, per_image


@attacks.register("pgd")
@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Projected gradient ascent on a loss, from a random start in the ball.

    Settings beside eps, norm and seed:
    `steps`: of an ascent.
    `step_size`: in pixels, in the norm; default eps / 4, and 1.5 * eps / steps where that is more: up to 6 steps.
    `restarts`: random starts, of which the worst result for the model is kept.
    `random_start`: from a random point of the ball; else from the image.
    `best`: keep the worst iterate for the model instead of the last.
    `momentum`: of gradients of unit L1 norm.
    `loss`: ce, dlr, margin, or kl with probabilities for labels.
    `bounds`: least and largest pixel of the images.
    `compile`: the model by torch.compile; pays off for long runs.
    `precision`: of the search: exact, fast or auto, as for autoattack.
    """

    radius_may_be_tensor: ClassVar[bool] = True

    steps: int = 10
    step_size: float | None = None
    restarts: int = 1
    random_start: bool = True
    best: bool = False
    momentum: float = 0.0
    loss: Loss = CE
    bounds: tuple[float, float] = (0.0, 1.0)
    compile: bool = False
    precision: str = "exact"

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        best = BestSoFar(x)
        for restart in range(self.restarts):
            begin = self.start(x, dice, restart) if start is None else start
            with torch.enable_grad():  # once instead of in every pass; nothing but its point asks for a gradient
                for step, (point, here) in enumerate(self.ascend(model, x, y, begin)):
                    tell_step(model, step, self.steps, restart, self.restarts)
                    if here is not None and self.best:
                        best.offer(point, self.fooled(here.logits, y), self.objective(here.logits, y))
            if self.restarts == 1 and not self.best:
                return point
            logits = full_precision(model(point))
            best.offer(point, self.fooled(logits, y), self.objective(logits, y))
        return best.x

    def refine(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once, from the worst point known."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice, start)

    def start(self, x: Tensor, dice: Dice, restart: int = 0) -> Tensor:
        """Where an ascent begins."""
        if not self.random_start:
            return x
        return self.norm.random(x, self.eps, dice, restart).add_(x).clamp_(*self.bounds)

    def ascend(self, model: Model, x: Tensor, y: Tensor, start: Tensor) -> Iterator[tuple[Tensor, LossAndGrad | None]]:
        """Every point from which a step is made with its loss and gradient, then the last point alone."""
        step = self.step_length()
        point = start
        velocity = torch.zeros_like(x)
        for _ in range(self.steps):
            here = loss_and_grad(model, point, lambda logits: self.objective(logits, y))
            yield point, here
            velocity = self._accumulate(velocity, here.grad)
            direction = self.norm.usable(velocity, point, *self.bounds)
            delta = self.norm.steepest(direction).mul_(step).add_(point).sub_(x)
            point = self.norm.project(delta, self.eps).add_(x).clamp_(*self.bounds)
        yield point, None

    def step_length(self) -> float:
        """The length of a step: `step_size`, or the default for this eps and number of steps."""
        return max(self.eps / 4, 1.5 * self.eps / self.steps) if self.step_size is None else self.step_size

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        """What is maximised, (B,)."""
        return self.loss(logits, y)

    def fooled(self, logits: Tensor, y: Tensor) -> Tensor:
        """Whether the ascent has reached its aim, (B,)."""
        return logits.argmax(1) != hard_labels(y)

    def _accumulate(self, velocity: Tensor, grad: Tensor) -> Tensor:
        if not self.momentum:
            return grad
        return self.momentum * velocity + grad / per_image(L1.length(grad) + 1e-12, grad)
