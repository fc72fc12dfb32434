"""Carlini & Wagner's L2 attack: the smallest change that fools the model, by Adam in tanh space and bisection.

Carlini & Wagner 2017, arXiv:1608.04644, section V.A: minimise ‖x' − x‖² + c · max(z_y − max z_other, −confidence) over
x' = (tanh w + 1) / 2, and bisect c for each image. B images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import full_precision, gradient_of, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import MARGIN, hard_labels
from vitruvius.attacks.norms import L2, Norm, per_image

LOOKS = 10  # times in a run that it may end early
LEAST_FALL = 1e-4  # share of its objective
EDGE = 1 - 1e-6  # pixels of exactly 0 and 1 have no finite w


class Closest(NamedTuple):
    """The nearest points found."""

    x: Tensor
    distance: Tensor  # (B,) in L2; inf before one is found

    def or_nearer(self, x: Tensor, distance: Tensor, fooled: Tensor) -> Closest:
        """These, or `x` (B, C, H, W) for the images where it has `fooled` (B,) the model at less `distance` (B,)."""
        nearer = fooled & (distance < self.distance)
        return Closest(torch.where(per_image(nearer, x), x, self.x), torch.where(nearer, distance, self.distance))


@attacks.register("carlini")
@dataclass(frozen=True, kw_only=True)
class Carlini(Attack):
    """Carlini & Wagner L2: the smallest change that fools the model, cut to eps if eps is given.

    Settings beside seed (which changes nothing here); the norm is l2:
    `eps`: the result is brought into this ball; default inf, the smallest change as it is found.
    `confidence`: logits by which the wrong class must win.
    `steps`: of Adam for each constant.
    `search_steps`: of the bisection of the constant c.
    `first_constant`: the first c.
    `lr`: learning rate of Adam, in tanh space.
    `abort_early`: a run ends for an image whose objective has not fallen during the last tenth of the steps, as
    published; else all steps are made.
    """

    norms = ("l2",)
    draws = False
    finds_nearest = True

    eps: float = float("inf")
    norm: Norm = L2
    confidence: float = 0.0
    steps: int = 1000
    search_steps: int = 9
    first_constant: float = 1e-2
    lr: float = 1e-2
    abort_early: bool = True

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        high = x.new_full((len(x),), torch.inf)
        low = torch.zeros_like(high)
        constant = torch.full_like(high, self.first_constant)
        closest = Closest(x, high)
        for number in range(self.search_steps):
            ends = self._descend(model, x, y, constant, number)
            worked = ends.distance < torch.inf
            closest = closest.or_nearer(*ends, worked)
            low = torch.where(worked, low, constant)
            high = torch.where(worked, constant, high)
            constant = torch.where(high < torch.inf, (low + high) / 2, constant * 10)
        return (x + self.norm.project(closest.x - x, self.eps)).clamp(0, 1)

    def _descend(self, model: Model, x: Tensor, y: Tensor, constant: Tensor, number: int) -> Closest:
        """Run number `number` of Adam, with a constant c (B,) for each image."""
        ends = Closest(x.clone(), x.new_full((len(x),), torch.inf))
        rows = torch.arange(len(x), device=x.device)  # the images whose objective still falls
        w = ((2 * x - 1) * EDGE).atanh()
        mean, square = torch.zeros_like(w), torch.zeros_like(w)
        closest = Closest(x, torch.full_like(constant, torch.inf))
        lowest = last = closest.distance  # (B,) of the objective, and when it was last looked at
        for step in range(1, self.steps + 1):
            point, distance, margin, grad = self._look(model, x[rows], y[rows], w, constant[rows])
            closest = closest.or_nearer(point, distance.sqrt(), margin > self.confidence)
            lowest = lowest.minimum(distance + constant[rows] * (self.confidence - margin).clamp(min=0))
            mean = mean.lerp(grad, 0.1)
            square = square.lerp(grad * grad, 0.001)
            w = w - self.lr * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            tell_step(model, step, self.steps, number, self.search_steps)
            if step % math.ceil(self.steps / LOOKS) == 0 and self.abort_early:
                falls = lowest <= (1 - LEAST_FALL) * last
                done = rows[~falls]
                ends.x[done], ends.distance[done] = closest.x[~falls], closest.distance[~falls]
                rows, w, mean, square = rows[falls], w[falls], mean[falls], square[falls]
                closest = Closest(closest.x[falls], closest.distance[falls])
                lowest = last = lowest[falls]
                if not len(rows):
                    return ends
        ends.x[rows], ends.distance[rows] = closest
        return ends

    def _look(self, model: Model, x: Tensor, y: Tensor, w: Tensor, constant: Tensor) -> tuple[Tensor, ...]:
        """Point, squared distance, margin of the wrong class, and the gradient of the objective in w."""
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            free = (w.tanh() / EDGE + 1) / 2  # beyond the image by rounding, where clamp would have no gradient
            point = free + (free.clamp(0, 1) - free).detach()
            distance = (point - x).flatten(1).square().sum(1)
            margin = MARGIN(full_precision(model(point)), y)
            grad = gradient_of(model, distance - constant * margin.clamp(max=self.confidence), w)
        return point.detach(), distance.detach(), margin.detach(), grad
