"""Motion during exposure: one-sided Gaussian weights along a line, each image in its own direction.

As ImageMagick's motion blur, step by whole pixels. B images (B, C, H, W).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius.corruptions._resampling import take


def motion(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Blur along `angle` (B,) degrees over 2 radius + 1 steps; the edges are continued."""
    steps = 2 * radius + 1
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(steps)]
    direction = torch.deg2rad(angle.double())
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    blurred = torch.zeros_like(x)
    for step, weight in enumerate(weights):
        down, right = ((step * part - 0.5 - 1e-9).ceil().long()[:, None] for part in (direction.sin(), direction.cos()))
        from_row = (rows + down).clamp(0, x.shape[-2] - 1)  # (B, H)
        from_column = (columns + right).clamp(0, x.shape[-1] - 1)  # (B, W)
        blurred += weight / sum(weights) * take(x, from_row[:, :, None] * x.shape[-1] + from_column[:, None])
    return blurred
