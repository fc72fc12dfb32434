"""Fast gradient (sign) method: one step of length eps along the steepest direction (Goodfellow et al. 2015).

x' = x + eps · sign(∇ₓ loss) in L∞, x + eps · ∇ₓ loss / ‖∇ₓ loss‖₂ in L2. arXiv:1412.6572
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, Loss


@attacks.register("fgsm")
@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One step of length eps from the image itself, no random start.

    Settings beside eps, norm and seed (which changes nothing here):
    `loss`: ce, dlr, margin, or kl with probabilities for labels.
    `bounds`: least and largest pixel of the images.
    """

    draws = False

    loss: Loss = CE
    bounds: tuple[float, float] = (0.0, 1.0)

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        grad = loss_and_grad(model, x, lambda logits: self.loss(logits, y)).grad
        delta = self.norm.project(self.norm.steepest(grad).mul_(self.eps), self.eps)
        return delta.add_(x).clamp_(*self.bounds)
