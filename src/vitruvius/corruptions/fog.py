"""Fog: a fractal of heights laid over the image. Hendrycks & Dietterich 2019; diamond-square, Fournier et al. 1982.

B images (B, C, H, W); heights (B, n, n), n the power of two that covers the image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("fog")
class Fog(Corruption):
    """A fractal fog."""

    name = "fog"
    imagenet = ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))  # amount, how finer details fade
    cifar = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))

    def disturb(self, x: Tensor, dice: Dice, /, amount: float, decay: float) -> Tensor:
        height, width = x.shape[-2:]
        side = 1 << (max(height, width) - 1).bit_length()
        fog = plasma(dice, side, decay)[:, None, :height, :width]
        brightest = x.amax((1, 2, 3), keepdim=True)
        return fog.mul(amount).add(x).mul_(brightest).div_(brightest + amount)


def plasma(dice: Dice, side: int, decay: float) -> Tensor:
    """(B, side, side) heights in [0, 1] by diamonds and squares on a torus; `decay` divides them at each halving."""
    heights = torch.zeros(len(dice.ids), side, side, device=dice.ids.device)
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = _mean(pairs + pairs.roll(-1, 2), dice, "squares", step, wobble)
        centres = heights[:, half::step, half::step]
        along = (centres + centres.roll(1, 1)).add_(corners).add_(corners.roll(-1, 2))
        heights[:, ::step, half::step] = _mean(along, dice, "rows", step, wobble)
        across = (centres + centres.roll(1, 2)).add_(corners).add_(corners.roll(-1, 1))
        heights[:, half::step, ::step] = _mean(across, dice, "columns", step, wobble)
        step, wobble = half, wobble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights.div_(heights.amax((1, 2), keepdim=True))


def _mean(total: Tensor, dice: Dice, stream: str, step: int, wobble: float) -> Tensor:
    """A quarter of four neighbours' sum, displaced by up to wobble²; in place, since new memory costs time."""
    moved = dice.uniform(stream, total.shape[1:], step).mul_(2).sub_(1).mul_(wobble**2)
    return moved.add_(total.div_(4))
