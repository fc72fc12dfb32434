"""Blurs: lenses, a camera that moves, frosted glass. Hendrycks & Dietterich 2019; `gaussian_blur` is an extra one.

A camera that moves while it looks gives one-sided Gaussian weights along a line, each image its own direction, as
ImageMagick's motion blur, step by whole pixels. One that moves towards the scene gives the mean of ever larger copies:
number i of n is the middle of the image enlarged by 1 + i · growth, so the first copy is the image itself.

Behind frosted glass pixels take the place of neighbours, between two Gaussian blurs. The published loop means to swap
two pixels, but its two halves share memory, so it copies: pixel p takes the value of p + d, and p + d keeps its own. We
copy as well. The loop goes from the last pixel to the first, and later pixels see what earlier ones did: who copies
from a pixel that has copied already gets what that one got. So each pixel follows its sources to the end, twice as far
at every step, and the result is that of the loop exactly. B images (B, C, H, W).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import SMALL, Corruption, corruptions, to_levels
from vitruvius.corruptions.filters import clipped_zoom, correlate, disk, gaussian, pad, take


@corruptions.register("defocus_blur")
class DefocusBlur(Corruption):
    """A lens out of focus: every point becomes a disk."""

    name = "defocus_blur"
    imagenet = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))  # radius of the disk, sigma of its edge: pixels
    cifar = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))

    def disturb(self, x: Tensor, dice: Dice, /, radius: float, softness: float) -> Tensor:
        return correlate(x, disk(radius, softness, x.dtype, x.device))


@corruptions.register("gaussian_blur")
class GaussianBlur(Corruption):
    """Gaussian blur."""

    name = "gaussian_blur"
    imagenet = (1, 2, 3, 4, 6)  # sigma, pixels
    cifar = (0.4, 0.6, 0.7, 0.8, 1)

    def disturb(self, x: Tensor, dice: Dice, /, sigma: float) -> Tensor:
        return gaussian(x, sigma)


@corruptions.register("motion_blur")
class MotionBlur(Corruption):
    """A camera that moves, up to 45° from the horizontal."""

    name = "motion_blur"
    imagenet = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # half the length, sigma of its weights: pixels
    cifar = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))

    def disturb(self, x: Tensor, dice: Dice, /, radius: int, sigma: float) -> Tensor:
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


@corruptions.register("zoom_blur")
class ZoomBlur(Corruption):
    """A camera that moves forward: the mean of ever larger copies."""

    name = "zoom_blur"
    # number of copies, growth from each copy to the next
    imagenet = ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03))  # enlarged up to 1.11 … 1.30 times
    cifar = ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01))

    def disturb(self, x: Tensor, dice: Dice, /, copies: int, growth: float) -> Tensor:
        total = x.clone()
        # As numpy.arange counts in the published code: without this rounding, one copy of 26 has another size.
        growth = (1 + growth) - 1
        for step in range(copies):
            total += clipped_zoom(x, 1 + growth * step)
        return total / (copies + 1)


@corruptions.register("glass_blur")
class GlassBlur(Corruption):
    """Frosted glass: pixels wander a little, between two blurs."""

    name = "glass_blur"
    # sigma of both blurs, reach of a pixel's way, rounds in which all pixels wander
    imagenet = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
    cifar = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))

    def disturb(self, x: Tensor, dice: Dice, /, sigma: float, reach: int, rounds: int) -> Tensor:
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
