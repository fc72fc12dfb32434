"""A lens out of focus: every point becomes a disk. Hendrycks & Dietterich 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import correlate, disk


@corruptions.register("defocus_blur")
@dataclass(frozen=True, kw_only=True)
class DefocusBlur(Corruption):
    """A lens out of focus: every point becomes a disk."""

    name: ClassVar[str] = "defocus_blur"
    imagenet: ClassVar = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))  # radius and softness, pixels
    cifar: ClassVar = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))

    def disturb(self, x: Tensor, dice: Dice, /, radius: float, softness: float) -> Tensor:
        """`radius` of the disk in pixels, `softness` the sigma by which its edge is blurred."""
        return correlate(x, disk(radius, softness, x.dtype, x.device))
