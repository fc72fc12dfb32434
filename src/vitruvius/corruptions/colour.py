"""Light and colours. Hendrycks & Dietterich 2019; `saturate` is one of their extra corruptions.

Saturation in HSV: with value v = max over channels and saturation s = (v - min) / v, a channel is v - v · s · share,
where share says how far it lies between the largest and the smallest channel. Hue is that share and stays; s becomes
s · factor + summand, cut to [0, 1]. Grey pixels have no hue; HSV counts them as red, so a summand tints them.
B images (B, C, H, W); those of one channel are not saturated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("brightness")
class Brightness(Corruption):
    """More light: the value of every colour is raised, hue and saturation stay."""

    name = "brightness"
    imagenet = (0.1, 0.2, 0.3, 0.4, 0.5)  # added to the value
    cifar = (0.05, 0.1, 0.15, 0.2, 0.3)

    def disturb(self, x: Tensor, dice: Dice, /, amount: float) -> Tensor:
        value = x.amax(1, keepdim=True)
        brighter = (value + amount).clamp(max=1)
        return torch.where(value > 0, x * (brighter / value), brighter)  # hue and saturation are ratios of channels


@corruptions.register("contrast")
class Contrast(Corruption):
    """Little contrast: every channel approaches its mean over the image."""

    name = "contrast"
    imagenet = (0.4, 0.3, 0.2, 0.1, 0.05)  # what is left of the distance to the mean
    cifar = (0.75, 0.5, 0.4, 0.3, 0.15)

    def disturb(self, x: Tensor, dice: Dice, /, left: float) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return (x - mean) * left + mean


@corruptions.register("saturate")
class Saturate(Corruption):
    """Colours paler (severity 1, 2) or stronger (3 to 5); grey images have none and stay."""

    name = "saturate"
    imagenet = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))  # factor and summand of the saturation
    cifar = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))

    def disturb(self, x: Tensor, dice: Dice, /, factor: float, summand: float) -> Tensor:
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
