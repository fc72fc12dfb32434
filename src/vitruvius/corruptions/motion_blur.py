"""A camera that moves while it looks: one-sided Gaussian weights along a line, each image in its own direction.

Hendrycks & Dietterich 2019; as ImageMagick's motion blur, step by whole pixels. B images (B, C, H, W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import SMALL, Corruption, corruptions
from vitruvius.corruptions.filters import pad, take


@corruptions.register("motion_blur")
@dataclass(frozen=True, kw_only=True)
class MotionBlur(Corruption):
    """A camera that moves, up to 45° from the horizontal."""

    name: ClassVar[str] = "motion_blur"
    imagenet: ClassVar = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # radius and sigma, pixels
    cifar: ClassVar = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))

    def disturb(self, x: Tensor, dice: Dice, /, radius: int, sigma: float) -> Tensor:
        """`radius` is half the length of the line and `sigma` that of its weights, in pixels."""
        return motion(x, radius, sigma, 90 * dice.uniform("angle", ()) - 45)


def motion(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Blur along `angle` (B,) degrees over 2 radius + 1 steps; the edges are continued."""
    steps = 2 * radius + 1
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(steps)]
    height, width = x.shape[-2:]
    direction = torch.deg2rad(angle.double())
    way = torch.arange(steps, device=x.device)[:, None] * torch.stack((direction.sin(), direction.cos()))[:, None]
    down, right = (way - 0.5 - 1e-9).ceil().long()  # (steps, B)
    blurred = torch.zeros_like(x)
    if x.device.type == "cpu" and height * width > SMALL**2:  # what is copied by its place costs more than a piece
        padded = pad(x, steps, "nearest")
        for image, (rows, columns) in enumerate(
            zip((down + steps).T.tolist(), (right + steps).T.tolist(), strict=True)
        ):
            for weight, row, column in zip(weights, rows, columns, strict=True):
                piece = padded[image, :, row : row + height, column : column + width]
                blurred[image] += weight / sum(weights) * piece
        return blurred
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    for weight, lower, further in zip(weights, down[:, :, None], right[:, :, None], strict=True):
        from_row = (rows + lower).clamp(0, height - 1)  # (B, H)
        from_column = (columns + further).clamp(0, width - 1)  # (B, W)
        blurred += weight / sum(weights) * take(x, from_row[:, :, None] * width + from_column[:, None])
    return blurred
