"""Fast adaptive boundary attack toward the likeliest wrong classes (FAB-T, Croce & Hein 2020, arXiv:2003.01690)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks.base import Model, attacks
from vitruvius.attacks.fab import FastAdaptiveBoundary, Plane
from vitruvius.attacks.losses import TARGETED_MARGIN, likeliest_classes


@attacks.register("fab_targeted")
@dataclass(frozen=True, kw_only=True)
class FABTargeted(FastAdaptiveBoundary):
    """Fast adaptive boundary attack toward each of the likeliest wrong classes: one gradient per step.

    It looks for the nearest point that fools the model, toward one class after the other.

    Settings beside norm and seed:
    `eps`: an image is done with the first point within it; inf: the nearest point that all searches find.
    `targets`: wrong classes tried; fewer where the model has fewer.
    `steps`: of the search toward each of them.
    `restarts`: for each target, the first from the image itself, the others from random points around it.
    `batch_size`: images searched at once; default all.
    """

    targets: int = 9

    def linearise(self, model: Model, point: Tensor, y: Tensor, target: Tensor) -> Plane:
        """Where the logits of target and label meet."""
        here = loss_and_grad(model, point, lambda logits: TARGETED_MARGIN(logits, y, target))
        return Plane(here.loss.to(point), here.grad)

    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield from likeliest_classes(logits, y, self.targets).T
