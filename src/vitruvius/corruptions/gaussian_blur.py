"""A soft lens: every pixel is a normal mean of its neighbourhood. Hendrycks & Dietterich 2019, extra corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import gaussian


@corruptions.register("gaussian_blur")
@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Corruption):
    """Gaussian blur."""

    name: ClassVar[str] = "gaussian_blur"
    imagenet: ClassVar = (1, 2, 3, 4, 6)  # sigma, pixels
    cifar: ClassVar = (0.4, 0.6, 0.7, 0.8, 1)

    def disturb(self, x: Tensor, dice: Dice, /, sigma: float) -> Tensor:
        """`sigma` of the blur, in pixels."""
        return gaussian(x, sigma)
