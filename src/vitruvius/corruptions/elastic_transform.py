"""Rubber: a random affine map of three points, then small random displacements. Hendrycks & Dietterich 2019.

Simard et al. 2003 for the displacements. B images (B, C, H, W).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import gaussian, sample


@corruptions.register("elastic_transform")
class ElasticTransform(Corruption):
    """Rubber: strong slow bends (severity 1, 2) or small quick ones (3 to 5)."""

    name = "elastic_transform"
    # strength and sigma of the displacements, reach of the three points: parts of the side; at 224 pixels 244 × 2 …
    imagenet = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    cifar = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))

    def disturb(self, x: Tensor, dice: Dice, /, strength: float, sigma: float, reach: float) -> Tensor:
        side = min(x.shape[-2:]) * (1 if self.is_small(x) else 244 / 224)
        corners = (2 * dice.uniform("corners", (3, 2)) - 1) * reach * side
        x = sample(x, *affine_places(x, corners.double()), border="reflect_101")
        if not strength:
            return x
        noise = 2 * dice.uniform("displacement", (2, *x.shape[-2:])) - 1
        bend = gaussian(noise, sigma * side, border="reflect", truncate=3) * strength * side  # (B, 2, H, W)
        rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
        return sample(x, rows[:, None] + bend[:, 0], columns + bend[:, 1], border="reflect")


def affine_places(x: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (B, H, W) that pixels come from when three corners of the middle move by (B, 3, 2) pixels."""
    height, width = x.shape[-2:]
    third = min(height, width) // 3
    signs = moves.new_tensor([[1, 1], [-1, 1], [-1, -1]])  # (row, column) from the middle
    before = moves.new_tensor([height // 2, width // 2]) + third * signs
    after = before + moves
    ones = torch.ones_like(after[..., :1])
    back = torch.linalg.solve(torch.cat((after, ones), -1), before.expand_as(after))  # (B, 3, 2): after → before
    rows = torch.arange(height, device=x.device, dtype=moves.dtype)[:, None]
    columns = torch.arange(width, device=x.device, dtype=moves.dtype)
    places = [
        back[:, 0, axis, None, None] * rows + back[:, 1, axis, None, None] * columns + back[:, 2, axis, None, None]
        for axis in (0, 1)
    ]
    return places[0].to(x.dtype), places[1].to(x.dtype)
