"""Sparse L1 descent: each step moves only the pixels of largest gradient (Tramèr & Boneh 2019, arXiv:1904.13000)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import largest, project_l1_box, safe_radius
from vitruvius.attacks._models import loss_and_grad, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, Loss
from vitruvius.attacks.norms import L1, Norm, per_image


@attacks.register("sparse_l1")
@dataclass(frozen=True, kw_only=True)
class SparseL1(Attack):
    """Gradient ascent in L1 that moves the steepest pixels which still have room, from the image itself.

    Settings beside eps and seed (which changes nothing here); the norm is l1:
    `steps`: of the ascent.
    `step_size`: in L1, pixels in [0, 1]; default 2 * eps / steps.
    `share`: of pixels moved by a step.
    `loss`: ce, dlr or margin.
    """

    norms = ("l1",)
    draws = False

    norm: Norm = L1
    steps: int = 20
    step_size: float | None = None
    share: float = 0.01
    loss: Loss = CE

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        step_size = 2 * self.eps / self.steps if self.step_size is None else self.step_size
        point = x
        share = x.new_full((len(x),), self.share)
        for step in range(self.steps):
            grad = loss_and_grad(model, point, lambda logits: self.loss(logits, y)).grad
            signs = largest(L1.usable(grad, point, 0.0, 1.0), share)
            stride = per_image(step_size / signs.flatten(1).abs().sum(1).clamp(min=1), x)
            point = x + project_l1_box(x, point + stride * signs - x, safe_radius(x, self.eps))
            tell_step(model, step + 1, self.steps)
        return point
