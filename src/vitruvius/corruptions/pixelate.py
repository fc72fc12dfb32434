"""Too few pixels: shrunk by boxes, enlarged by blocks. Hendrycks & Dietterich 2019."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import box_shrink


@corruptions.register("pixelate")
class Pixelate(Corruption):
    """Too few pixels, shown as blocks."""

    name = "pixelate"
    gives_levels = True
    imagenet = (0.6, 0.5, 0.4, 0.3, 0.25)  # what is left of each side
    cifar = (0.95, 0.9, 0.85, 0.75, 0.65)

    def disturb(self, x: Tensor, dice: Dice, /, left: float) -> Tensor:
        height, width = x.shape[-2:]
        small = box_shrink((x * 255).round_(), max(int(height * left), 1), max(int(width * left), 1))
        return F.interpolate(small, size=(height, width), mode="nearest-exact").div_(255)
