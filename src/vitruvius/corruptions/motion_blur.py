"""A camera that moves while it looks. Hendrycks & Dietterich 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.corruptions._base import Corruption, corruptions
from vitruvius.corruptions._motion import motion


@corruptions.register("motion_blur")
@dataclass(frozen=True, kw_only=True)
class MotionBlur(Corruption):
    """A camera that moves, up to 45° from the horizontal."""

    name: ClassVar[str] = "motion_blur"
    imagenet: ClassVar = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # radius and sigma, pixels
    cifar: ClassVar = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))

    def disturb(self, x: Tensor, dice: Dice, /, radius: int, sigma: float) -> Tensor:
        return motion(x, radius, sigma, 90 * dice.uniform("angle", ()) - 45)
