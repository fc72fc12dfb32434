"""Frosted glass: pixels take the place of neighbours, between two Gaussian blurs. Hendrycks & Dietterich 2019.

The published loop means to swap two pixels, but its two halves share memory, so it copies: pixel p takes the value of
p + d, and p + d keeps its own. We copy as well. The loop goes from the last pixel to the first, and later pixels see
what earlier ones did: who copies from a pixel that has copied already gets what that one got. So each pixel follows its
sources to the end, twice as far at every step, and the result is that of the loop exactly. B images (B, C, H, W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions, to_levels
from vitruvius.corruptions.filters import gaussian, take


@corruptions.register("glass_blur")
@dataclass(frozen=True, kw_only=True)
class GlassBlur(Corruption):
    """Frosted glass: pixels wander a little, between two blurs."""

    name: ClassVar[str] = "glass_blur"
    imagenet: ClassVar = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))  # sigma, reach, rounds
    cifar: ClassVar = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))

    def disturb(self, x: Tensor, dice: Dice, /, sigma: float, reach: int, rounds: int) -> Tensor:
        """`sigma` of both blurs and `reach` of a pixel's way, in pixels; `rounds` in which all pixels wander."""
        x = to_levels(gaussian(x, sigma)) / 255
        for step in range(rounds):
            offset = dice.integers("wander", 2 * reach, (2, *x.shape[-2:]), step) - reach  # (B, 2, H, W)
            x = wander(x, offset, reach)
        return gaussian(x, sigma)


def wander(x: Tensor, offset: Tensor, reach: int) -> Tensor:
    """Every inner pixel, the last one first, takes the value `offset` (B, 2, H, W) rows and columns away from it."""
    height, width = x.shape[-2:]
    rows, columns = (torch.arange(n, device=x.device) for n in (height, width))
    inner = ((rows > reach) & (rows <= height - reach))[:, None] & (columns > reach) & (columns <= width - reach)
    inner = inner.flatten()  # (H W,)
    place = torch.arange(height * width, device=x.device)
    step = (offset[:, 0] * width + offset[:, 1]).flatten(1)  # (B, H W)
    source = torch.where(inner, place + step, place)
    copied = inner[source] & (source > place)  # the source has copied before
    ahead = torch.where(copied, source, place)
    while not torch.equal(ahead, further := ahead.gather(1, ahead)):
        ahead = further
    return take(x, source.gather(1, ahead).view(-1, height, width))
