"""Snow: falling flakes with their tracks over a whitened image. Hendrycks & Dietterich 2019.

B images (B, C, H, W), one layer of flakes (B, 1, H, W).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.blurs import motion
from vitruvius.corruptions.filters import clipped_zoom


@corruptions.register("snow")
class Snow(Corruption):
    """Falling snow over a whitened image."""

    name = "snow"
    # mean and deviation of the noise, its zoom, threshold; radius and sigma of the motion; what is left of the image
    imagenet = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )
    cifar = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )

    def disturb(self, x: Tensor, dice: Dice, /, *constants: Any) -> Tensor:
        mean, std, zoom, threshold, radius, sigma, left = constants
        flakes = clipped_zoom(mean + std * dice.normal("flakes", (1, *x.shape[-2:])), zoom)
        flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
        flakes = motion(flakes, radius, sigma, -135 + 90 * dice.uniform("wind", ()))
        flakes = (flakes * 255).round() / 255
        whitened = torch.maximum(x, 1.5 * luminance(x) + 0.5)
        return left * x + (1 - left) * whitened + flakes + flakes.flip(-2, -1)


def luminance(x: Tensor) -> Tensor:
    """(B, 1, H, W) brightness as the eye sees it."""
    return x if x.shape[1] == 1 else (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
