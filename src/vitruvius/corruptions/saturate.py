"""Colours paler (severity 1, 2) or stronger (3 to 5), in HSV. Hendrycks & Dietterich 2019, extra corruption.

With value v = max over channels and saturation s = (v - min) / v, a channel is v - v · s · share, where share says
how far it lies between the largest and the smallest channel. Hue is that share and stays; s becomes
s · factor + summand, cut to [0, 1]. Grey pixels have no hue; HSV counts them as red, so a summand tints them.
B images (B, C, H, W), C is 3; images of one channel are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("saturate")
@dataclass(frozen=True, kw_only=True)
class Saturate(Corruption):
    """Colours paler (severity 1, 2) or stronger (3 to 5); grey images have none and stay."""

    name: ClassVar[str] = "saturate"
    imagenet: ClassVar = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))  # factor and summand of the saturation
    cifar: ClassVar = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))

    def disturb(self, x: Tensor, dice: Dice, /, factor: float, summand: float) -> Tensor:
        """The saturation, in [0, 1], is multiplied by `factor` and raised by `summand`."""
        if x.shape[1] == 1:
            return x
        value = x.amax(1, keepdim=True)
        missing = value - x  # (B, 3, H, W): what each channel lacks
        most = missing.amax(1, keepdim=True)
        saturation = most / value.clamp(min=1e-12)
        wanted = (saturation * factor + summand).clamp(0, 1)
        red = torch.ones_like(x).index_fill_(1, torch.zeros(1, dtype=torch.int64, device=x.device), 0)
        share = torch.where(most > 0, missing / most.clamp(min=1e-12), red)  # grey has hue 0 in HSV, which is red
        return value - value * wanted * share
