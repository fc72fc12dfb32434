"""Little contrast: colours approach the mean of the image. Hendrycks & Dietterich 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("contrast")
@dataclass(frozen=True, kw_only=True)
class Contrast(Corruption):
    """Little contrast: every channel approaches its mean over the image."""

    name: ClassVar[str] = "contrast"
    imagenet: ClassVar = (0.4, 0.3, 0.2, 0.1, 0.05)  # what is left of the distance to the mean
    cifar: ClassVar = (0.75, 0.5, 0.4, 0.3, 0.15)

    def disturb(self, x: Tensor, dice: Dice, /, left: float) -> Tensor:
        """`left` is the share of the contrast that is left."""
        mean = x.mean((2, 3), keepdim=True)
        return (x - mean) * left + mean
