"""Fast adaptive boundary attack (FAB) toward the nearest class (Croce & Hein 2020, arXiv:1907.02044)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks._fab import FastAdaptiveBoundary, Linearise, Nearest
from vitruvius.attacks.base import attacks


@attacks.register("fab")
@dataclass(frozen=True, kw_only=True)
class FAB(FastAdaptiveBoundary):
    """Fast adaptive boundary attack toward whichever class is nearest: a gradient for each class and step.

    It looks for the nearest point that fools the model: a step to the linearised boundary, drawn toward the image, and
    a move back toward the image wherever the model is fooled.

    Settings beside norm and seed:
    `eps`: an image is done with the first point within it; inf: the nearest point that all steps and restarts find.
    `steps`: of a search.
    `restarts`: the first from the image itself, the others from random points around it.
    `batch_size`: images searched at once; default all.

    It needs one backward pass per class and step: with many classes, `fab_targeted` is faster.
    """

    def linearise(self) -> Linearise:
        return Nearest(self.norm)

    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield y
