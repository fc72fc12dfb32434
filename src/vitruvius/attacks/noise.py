"""Noise: no search at all, the floor that every attack must beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks.base import Attack, Model, attacks


@attacks.register("uniform_noise")
@dataclass(frozen=True, kw_only=True)
class UniformNoise(Attack):
    """One point of the ball, drawn evenly.

    Settings: eps, norm and seed.
    """

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        return (x + self.norm.random(x, self.eps, dice)).clamp(0, 1)


@attacks.register("gaussian_noise")
@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Attack):
    """Normal noise, brought back into the ball where it leaves it.

    Settings beside eps, norm and seed:
    `std`: standard deviation of a pixel, images in [0, 1]; default eps.
    """

    std: float | None = None

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        std = self.eps if self.std is None else self.std
        delta = std * dice.normal("noise", x.shape[1:]).to(x.dtype)
        return (x + self.norm.project(delta, self.eps)).clamp(0, 1)
