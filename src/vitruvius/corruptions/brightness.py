"""Daylight: the value of the colours (HSV) is raised. Hendrycks & Dietterich 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("brightness")
@dataclass(frozen=True, kw_only=True)
class Brightness(Corruption):
    """More light: the value of every colour is raised, hue and saturation stay."""

    name: ClassVar[str] = "brightness"
    imagenet: ClassVar = (0.1, 0.2, 0.3, 0.4, 0.5)  # added to the value
    cifar: ClassVar = (0.05, 0.1, 0.15, 0.2, 0.3)

    def disturb(self, x: Tensor, dice: Dice, /, amount: float) -> Tensor:
        """`amount` is added to the value of each colour, in [0, 1]."""
        value = x.amax(1, keepdim=True)
        brighter = (value + amount).clamp(max=1)
        return torch.where(value > 0, x * (brighter / value), brighter)  # hue and saturation are ratios of channels
