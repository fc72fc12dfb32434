"""Lenses: soft, where every pixel is a normal mean of its neighbourhood, or out of focus, where a point is a disk.

Hendrycks & Dietterich 2019; `gaussian_blur` is one of their extra corruptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import correlate, disk, gaussian


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
