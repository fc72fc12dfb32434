"""Projected gradient descent toward another class: random, least likely, or the likeliest wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._errors import UnknownName, suggest
from vitruvius._random import Dice
from vitruvius.attacks.base import Model, attacks
from vitruvius.attacks.losses import hard_labels
from vitruvius.attacks.pgd import PGD


def random_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes drawn evenly from those that are not the label."""
    other = dice.integers("target", logits.shape[1] - 1)
    return other + (other >= y)


def least_likely_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes of the smallest logit that is not the label's."""
    return logits.scatter(1, y[:, None], torch.inf).argmin(1)


def likeliest_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes of the largest logit that is not the label's."""
    return logits.scatter(1, y[:, None], -torch.inf).argmax(1)


TARGETS: dict[str, Callable[[Tensor, Tensor, Dice], Tensor]] = {
    "random": random_class,
    "least_likely": least_likely_class,
    "likeliest": likeliest_class,
}


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

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        targets = TARGETS[self.target](model(x), hard_labels(y), dice)
        return super().search(model, x, targets, dice, start)

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        return -self.loss(logits, y)

    def fooled(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits.argmax(1) == y
