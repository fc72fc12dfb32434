"""A camera that moves towards the scene: the mean of ever larger copies. Hendrycks & Dietterich 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.corruptions._base import Corruption, corruptions
from vitruvius.corruptions._resampling import clipped_zoom


@corruptions.register("zoom_blur")
@dataclass(frozen=True, kw_only=True)
class ZoomBlur(Corruption):
    """A camera that moves forward: the mean of ever larger copies."""

    name: ClassVar[str] = "zoom_blur"
    imagenet: ClassVar = (
        (12, 0.01),
        (16, 0.01),
        (11, 0.02),
        (13, 0.02),
        (11, 0.03),
    )  # copies, growth from each to next
    cifar: ClassVar = ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01))

    def disturb(self, x: Tensor, dice: Dice, /, copies: int, growth: float) -> Tensor:
        total = x.clone()
        growth = (1 + growth) - 1  # as numpy.arange counts: one copy of 26 has another size without it
        for step in range(copies):
            total += clipped_zoom(x, 1 + growth * step)
        return total / (copies + 1)
