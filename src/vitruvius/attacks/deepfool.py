"""DeepFool: step after step to the nearest of the linearised boundaries (Moosavi-Dezfooli et al. 2016).

arXiv:1511.04599, algorithm 2 and section 3.3 for Linf. B images, K classes, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import full_precision, tell_step
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.fab import boundaries, dual_length
from vitruvius.attacks.losses import hard_labels, likeliest_classes
from vitruvius.attacks.norms import L2, Norm, per_image

BEYOND = 1e-4  # length added to each step, so that one that ends on the boundary crosses it


@attacks.register("deepfool")
@dataclass(frozen=True, kw_only=True)
class DeepFool(Attack):
    """DeepFool: steps to the nearest linearised boundary until the model is fooled, cut to eps if eps is given.

    A quick estimate of the distance to the decision boundary; `fab` and `ddn` find nearer points for more gradients.

    Settings beside norm (l2 or linf) and seed (which changes nothing here):
    `eps`: the result is brought into this ball; default inf, the change as it is found.
    `steps`: at most; an image is done as soon as the model is fooled.
    `candidates`: wrong classes considered, the likeliest ones of the clean image; a gradient for each of them.
    `overshoot`: share by which the change is longer than the linearised boundary asks for.
    """

    norms = ("linf", "l2")
    draws = False
    finds_nearest = True

    eps: float = math.inf
    norm: Norm = L2
    steps: int = 50
    candidates: int = 9
    overshoot: float = 0.02

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        logits = full_precision(model(x))
        candidates = likeliest_classes(logits, y, self.candidates)  # (B, C)
        point = x
        total = torch.zeros_like(x)
        for step in range(self.steps):
            fooled = logits.argmax(1) != y
            if bool(fooled.all()):
                break
            total = total + self._step(model, point, y, candidates)
            moved = (x + (1 + self.overshoot) * total).clamp(0, 1)
            point = torch.where(per_image(fooled, x), point, moved)
            logits = full_precision(model(point))
            tell_step(model, step + 1, self.steps)
        return (x + self.norm.project(point - x, self.eps)).clamp(0, 1)

    def _step(self, model: Model, point: Tensor, y: Tensor, candidates: Tensor) -> Tensor:
        """To the nearest of the candidates' linearised boundaries, and a little beyond."""
        nearest = point.new_full((len(point),), torch.inf)
        way = torch.zeros_like(point)
        for plane in boundaries(model, point, y, candidates):
            distance = plane.height.abs() / (dual_length(self.norm, plane.normal) + 1e-8)
            nearer = distance < nearest
            way = torch.where(per_image(nearer, point), plane.normal, way)
            nearest = torch.where(nearer, distance, nearest)
        return per_image(nearest + BEYOND, point) * self.norm.steepest(way)
