"""Frosted glass: pixels take the place of neighbours, between two Gaussian blurs. Hendrycks & Dietterich 2019.

The published loop means to swap two pixels, but its two halves share memory, so it copies: pixel p takes the value of
p + d, and p + d keeps its own. We copy as well. The loop goes from the last pixel to the first, and later pixels see
what earlier ones did; pixels on a slanted line do not see each other, so a line is one step (see `waves`), and the
result is that of the loop exactly. B images (B, C, H, W), P inner pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions, to_levels
from vitruvius.corruptions.filters import gaussian


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
    batch, channels, height, width = x.shape
    step = offset[:, 0] * width + offset[:, 1]  # (B, H, W)
    pixels = x.flatten(2).permute(2, 0, 1).contiguous()  # (H W, B, C)
    source = (step.flatten(1) + torch.arange(height * width, device=x.device)).T  # (H W, B)
    image = torch.arange(batch, device=x.device)
    order, counts = waves(height, width, reach)
    for place in order.to(x.device).split(counts):
        pixels[place] = pixels[source[place], image]
    return pixels.permute(1, 2, 0).view(batch, channels, height, width)


def waves(height: int, width: int, reach: int) -> tuple[Tensor, list[int]]:
    """The numbers of the inner pixels in the loop's order, and how many at a time cannot see each other.

    Pixel (i, j) of the loop comes at time j + (reach + 1) i. Of two that see each other the later one has the
    larger time: in the same row at once, in a later row because it is at most `reach` columns back.
    """
    rows = torch.tensor(range(height - reach, reach, -1), dtype=torch.int64)
    columns = torch.tensor(range(width - reach, reach, -1), dtype=torch.int64)
    time = torch.arange(len(columns)) + (reach + 1) * torch.arange(len(rows))[:, None]
    place = rows[:, None] * width + columns
    order = time.flatten().argsort(stable=True)
    return place.flatten()[order], torch.bincount(time.flatten()).tolist()
