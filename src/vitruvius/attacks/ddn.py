"""Decoupled direction and norm (DDN): the smallest L2 change, by steps along a sphere that shrinks and grows.

Rony et al. 2019, arXiv:1811.09600, algorithm 1. Each step follows the normalised gradient; then the radius shrinks by
gamma where the model was fooled and grows by gamma where it was not, and the change is set to that radius. B images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import loss_and_grad, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, hard_labels
from vitruvius.attacks.norms import L2, Norm, per_image

LAST_STEP = 0.01  # length that the steps fall to, from 1, by a cosine


@attacks.register("ddn")
@dataclass(frozen=True, kw_only=True)
class DDN(Attack):
    """Decoupled direction and norm: the smallest L2 change that fools the model, cut to eps if eps is given.

    Settings beside seed; the norm is l2:
    `eps`: the result is brought into this ball; default inf, the smallest change as it is found.
    `steps`: gradients.
    `first_radius`: of the sphere that the search begins on, in L2, pixels in [0, 1].
    `gamma`: share by which the radius shrinks or grows after each step; between 0 and 1.

    Where a gradient is 0, the step takes a random direction.
    """

    norms = ("l2",)
    finds_nearest = True

    eps: float = math.inf
    norm: Norm = L2
    steps: int = 100
    first_radius: float = 1.0
    gamma: float = 0.05

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        delta = torch.zeros_like(x)
        radius = x.new_full((len(x),), self.first_radius)
        farthest = L2.length(torch.maximum(x, 1 - x))  # no change within the image is longer
        nearest = torch.zeros_like(x)
        distance = x.new_full((len(x),), torch.inf)
        for step in range(self.steps):
            here = loss_and_grad(model, x + delta, lambda logits: CE(logits, y))
            fooled = here.logits.argmax(1) != y
            nearer = fooled & (L2.length(delta) < distance)
            nearest = torch.where(per_image(nearer, x), delta, nearest)
            distance = torch.where(nearer, L2.length(delta), distance)
            delta = delta + self._step_length(step) * self._direction(here.grad, dice, step)
            radius = (radius * torch.where(fooled, 1 - self.gamma, 1 + self.gamma)).minimum(farthest)
            delta = delta * per_image(radius / L2.length(delta).clamp(min=1e-12), x)
            delta = (x + delta).clamp(0, 1) - x
            tell_step(model, step + 1, self.steps)
        return (x + L2.project(nearest, self.eps)).clamp(0, 1)

    def _step_length(self, step: int) -> float:
        """From 1 to almost LAST_STEP, by half a cosine."""
        return LAST_STEP + (1 - LAST_STEP) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def _direction(self, grad: Tensor, dice: Dice, step: int) -> Tensor:
        """Of unit length; random where there is no gradient."""
        flat = per_image(L2.length(grad) == 0, grad)
        noise = dice.normal("direction", grad.shape[1:], step).to(grad.dtype)
        grad = torch.where(flat, noise, grad)
        return grad / per_image(L2.length(grad).clamp(min=1e-12), grad)
