"""Projected gradient descent toward another class: random, least likely, or the likeliest wrong one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitruvius._dice import Dice
from vitruvius._errors import UnknownName, suggest
from vitruvius.attacks._base import Model, attacks
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._search.targets import TARGETS
from vitruvius.attacks.pgd import PGD


@attacks.register("targeted_pgd")
@dataclass(frozen=True, kw_only=True)
class TargetedPGD(PGD):
    """Projected gradient descent on the loss toward a wrong class.

    Settings: those of PGD, and
    `target`: random, least_likely or likeliest; never the true class.
    """

    target: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in TARGETS:
            known = ", ".join(TARGETS)
            raise UnknownName(f"no target named {self.target!r}{suggest(self.target, TARGETS)} Known: {known}.")

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        targets = TARGETS[self.target](model(x), hard_labels(y), dice)
        return super().search(model, x, targets, dice)

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        return -self.loss(logits, y)

    def fooled(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits.argmax(1) == y
