"""Iterated fast gradient sign with momentum (MI-FGSM) and with a look ahead (NI-FGSM): attacks that transfer.

Dong et al. 2018, arXiv:1710.06081, algorithm 1; Lin et al. 2020, arXiv:1908.06281, algorithm 1. As in the released
code, gradients are divided by the mean of their absolute values before they are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import loss_and_grad, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, Loss
from vitruvius.attacks.norms import per_image


@attacks.register("mi_fgsm")
@dataclass(frozen=True, kw_only=True)
class MIFGSM(Attack):
    """Momentum iterative FGSM: steps along a sum of gradients, from the image itself.

    Settings beside eps, norm (linf or l2) and seed (which changes nothing here):
    `steps`: of the ascent.
    `step_size`: in pixels, in the norm; default eps / steps, as published.
    `decay`: of the gradients added up so far; 0 is iterated FGSM.
    `loss`: ce, dlr, margin, or kl with probabilities for labels.
    """

    norms: ClassVar[tuple[str, ...]] = ("linf", "l2")
    draws = False

    steps: int = 10
    step_size: float | None = None
    decay: float = 1.0
    loss: Loss = CE

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        step_size = self.eps / self.steps if self.step_size is None else self.step_size
        point = x
        velocity = torch.zeros_like(x)
        for step in range(self.steps):
            seen = self.look_ahead(point, step_size, velocity)
            grad = loss_and_grad(model, seen, lambda logits: self.loss(logits, y)).grad
            size = grad.flatten(1).abs().mean(1).clamp(min=1e-12)
            velocity.mul_(self.decay).add_(grad / per_image(size, grad))
            delta = self.norm.steepest(velocity).mul_(step_size).add_(point).sub_(x)
            point = self.norm.project(delta, self.eps).add_(x).clamp_(0, 1)
            tell_step(model, step + 1, self.steps)
        return point

    def look_ahead(self, point: Tensor, step_size: float, velocity: Tensor) -> Tensor:
        """Where the gradient is taken."""
        return point


@attacks.register("ni_fgsm")
@dataclass(frozen=True, kw_only=True)
class NIFGSM(MIFGSM):
    """Nesterov iterative FGSM: MI-FGSM with the gradient where the momentum leads to.

    Settings: those of mi_fgsm, in linf.
    """

    norms: ClassVar[tuple[str, ...]] = ("linf",)

    def look_ahead(self, point: Tensor, step_size: float, velocity: Tensor) -> Tensor:
        return point + self.decay * step_size * velocity
