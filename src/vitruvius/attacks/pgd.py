"""Projected gradient ascent from a random point of the ball (Madry et al. 2018; momentum: Dong et al. 2018).

The step 1.5 eps / steps and the last iterate are the light recipe's (Debenedetti et al. 2023, arXiv:2209.07399).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice
from vitruvius._errors import ConfigError
from vitruvius.attacks._base import Attack, Model, attacks
from vitruvius.attacks._losses import CE, Loss, as_loss, hard_labels
from vitruvius.attacks._models import LossAndGrad, full_precision, loss_and_grad
from vitruvius.attacks._norms import L1, per_image
from vitruvius.attacks._search.best_so_far import BestSoFar
from vitruvius.attacks._views.compiled import compile_model


@attacks.register("pgd")
@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Projected gradient ascent on a loss, from a random start in the ball."""

    steps: int = 10
    step_size: float | None = None  # default 1.5 * eps / steps
    restarts: int = 1  # the worst of so many starts
    random_start: bool = True
    best: bool = False  # the worst iterate instead of the last
    momentum: float = 0.0  # of gradients of unit L1 norm
    loss: Loss = CE
    bounds: tuple[float, float] = (0.0, 1.0)
    compile: bool = False  # the model by torch.compile; pays off for long runs

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loss", as_loss(self.loss))
        if self.steps < 0 or self.restarts < 1:
            name = type(self).__name__
            raise ConfigError(f"{name} with steps={self.steps}, restarts={self.restarts}; expected at least 0 and 1.")

    def prepare(self, model: nn.Module, x: Tensor) -> nn.Module:
        return compile_model(model, x) if self.compile else model

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        compares = self.best or self.restarts > 1
        best = BestSoFar(x)
        for restart in range(self.restarts):
            for point, here in self.ascend(model, x, y, self.start(x, dice, restart)):
                if here is None and not compares:
                    return point
                if here is None or self.best:
                    logits = full_precision(model(point)) if here is None else here.logits
                    best.offer(point, self.fooled(logits, y), self.objective(logits, y))
        return best.x

    def start(self, x: Tensor, dice: Dice, restart: int = 0) -> Tensor:
        """Where an ascent begins."""
        if not self.random_start:
            return x
        return (x + self.norm.random(x, self.eps, dice, restart)).clamp(*self.bounds)

    def ascend(self, model: Model, x: Tensor, y: Tensor, start: Tensor) -> Iterator[tuple[Tensor, LossAndGrad | None]]:
        """Every point from which a step is made and the slope there, then the last point alone."""
        step = 1.5 * self.eps / max(self.steps, 1) if self.step_size is None else self.step_size
        point, velocity = start, torch.zeros_like(x)
        for _ in range(self.steps):
            here = loss_and_grad(model, point, lambda logits: self.objective(logits, y))
            yield point, here
            velocity = self._accumulate(velocity, here.grad)
            way = self.norm.usable(velocity, point, *self.bounds)
            delta = self.norm.project(point + step * self.norm.steepest(way) - x, self.eps)
            point = (x + delta).clamp(*self.bounds)
        yield point, None

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        """What is climbed, (B,)."""
        return self.loss(logits, y)

    def fooled(self, logits: Tensor, y: Tensor) -> Tensor:
        """Whether the ascent has reached its aim, (B,)."""
        return logits.argmax(1) != hard_labels(y)

    def _accumulate(self, velocity: Tensor, grad: Tensor) -> Tensor:
        if not self.momentum:
            return grad
        return self.momentum * velocity + grad / per_image(L1.length(grad) + 1e-12, grad)

    def image_range(self) -> tuple[float, float]:
        return self.bounds
