"""Fast adaptive boundary attack toward the likeliest wrong classes (FAB-T, Croce & Hein 2020, arXiv:2003.01690)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks.base import attacks
from vitruvius.attacks.fab import FastAdaptiveBoundary, Linearise, toward_target
from vitruvius.attacks.losses import likeliest_classes


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

    def linearise(self) -> Linearise:
        return toward_target

    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield from likeliest_classes(logits, y, self.targets).T
