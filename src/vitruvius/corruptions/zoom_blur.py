"""A camera that moves towards the scene: the mean of ever larger copies. Hendrycks & Dietterich 2019.

Copy number i of n is the middle of the image enlarged by 1 + i · growth, so the first copy is the image itself; the
result is the mean of the image and its n copies.
B images (B, C, H, W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import clipped_zoom


@corruptions.register("zoom_blur")
@dataclass(frozen=True, kw_only=True)
class ZoomBlur(Corruption):
    """A camera that moves forward: the mean of ever larger copies."""

    name: ClassVar[str] = "zoom_blur"
    # number of copies, growth from each copy to the next
    imagenet: ClassVar = (
        (12, 0.01),  # enlarged up to 1.11 times
        (16, 0.01),  # 1.15
        (11, 0.02),  # 1.20
        (13, 0.02),  # 1.24
        (11, 0.03),  # 1.30
    )
    cifar: ClassVar = ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01))

    def disturb(self, x: Tensor, dice: Dice, /, copies: int, growth: float) -> Tensor:
        """`copies` are averaged with the image, each enlarged by `growth` more than the one before."""
        total = x.clone()
        # As numpy.arange counts in the published code: without this rounding, one copy of 26 has another size.
        growth = (1 + growth) - 1
        for step in range(copies):
            total += clipped_zoom(x, 1 + growth * step)
        return total / (copies + 1)
