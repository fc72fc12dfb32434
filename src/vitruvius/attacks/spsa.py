"""SPSA: gradient ascent on gradients estimated from differences of the loss (Uesato et al. 2018, arXiv:1802.05666).

The differences are taken around the point reached so far, in pairs of opposite random signs. B images, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import full_precision, tell_step
from vitruvius.attacks.base import Attack, Cost, Model, attacks
from vitruvius.attacks.losses import MARGIN, Loss


@attacks.register("spsa")
@dataclass(frozen=True, kw_only=True)
class SPSA(Attack):
    """Adam on gradients estimated from random differences of the margin at the perturbed point; no gradients needed.

    Settings beside eps, norm and seed:
    `steps`: of Adam.
    `samples`: pairs of queries for each gradient.
    `width`: of the differences, in pixels of images in [0, 1].
    `lr`: learning rate of Adam, in pixels.
    `group`: pairs given to the model at once.
    `loss`: margin, ce or dlr.
    """

    steps: int = 40
    samples: int = 128
    width: float = 0.01
    lr: float = 0.01
    group: int = 32
    loss: Loss = MARGIN

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        delta = torch.zeros_like(x)
        mean = torch.zeros_like(x)
        square = torch.zeros_like(x)
        for step in range(1, self.steps + 1):
            grad = self.estimate(model, x + delta, y, dice, step)
            mean = mean.lerp(grad, 0.1)
            square = square.lerp(grad * grad, 0.001)
            rise = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            delta = (x + self.norm.project(delta + self.lr * rise, self.eps)).clamp(0, 1) - x
            tell_step(model, step, self.steps)
        return (x + self.norm.project(delta, self.eps)).clamp(0, 1)

    def cost(self) -> Cost:
        return Cost(self.steps, 2 * self.samples)

    def estimate(self, model: Model, point: Tensor, y: Tensor, dice: Dice, step: int) -> Tensor:
        """The mean over S random signs v of (loss(point + width v) − loss(point − width v)) / (2 width) · v."""
        total = torch.zeros_like(point)
        for first in range(0, self.samples, self.group):
            count = min(self.group, self.samples - first)
            signs = dice.signs(f"signs {first}", (count, *point.shape[1:]), step).to(point.dtype)  # (B, S, C, H, W)
            up = self._loss(model, point[:, None] + self.width * signs, y)
            down = self._loss(model, point[:, None] - self.width * signs, y)
            total += torch.einsum("bs,bs...->b...", up - down, signs)
        return total / (2 * self.width * self.samples)

    def _loss(self, model: Model, points: Tensor, y: Tensor) -> Tensor:
        """(B, S) losses of points (B, S, C, H, W)."""
        count = points.shape[1]
        logits = full_precision(model(points.flatten(0, 1)))
        return self.loss(logits, y.repeat_interleave(count, 0)).view(-1, count).to(points)
