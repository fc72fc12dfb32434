"""Rain drops (severity 1 to 3) or mud (4, 5) on the lens. Hendrycks & Dietterich 2019, extra corruption.

B images (B, C, H, W), one layer of liquid (B, 1, H, W). Two steps of OpenCV are replaced by their exact meaning: edges
of drops need no tracking, since all of them are steep, and distances to them are Euclidean, not chamfered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions, to_levels
from vitruvius.corruptions.filters import gaussian, pad, stencil
from vitruvius.corruptions.snow import luminance

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
STEEP = 150  # levels: what counts as an edge
FAR = 20  # pixels: distances end here


@corruptions.register("spatter")
class Spatter(Corruption):
    """Rain drops (severity 1 to 3) or mud (4, 5) on the lens."""

    name = "spatter"
    # mean and deviation of the noise, its sigma, threshold; strength of water or softness of mud; whether mud
    imagenet = (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    )
    cifar = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )

    def disturb(
        self, x: Tensor, dice: Dice, /, mean: float, std: float, sigma: float, threshold: float, last: float, mud: int
    ) -> Tensor:
        liquid = gaussian(mean + std * dice.normal("liquid", (1, *x.shape[-2:])), sigma)
        if mud:
            cover = gaussian((liquid > threshold).to(x.dtype), last)
            cover = torch.where(cover < 0.8, 0, cover)
            return x * (1 - cover) + coloured(cover, MUD, x)
        drops = to_levels(torch.where(liquid < threshold, 0, liquid).clamp(0, 1))
        shine = drops * relief(drops)
        shine = shine / shine.amax((1, 2, 3), keepdim=True).clamp(min=1)
        return x + coloured(last * shine, WATER, x)


def coloured(layer: Tensor, colour: tuple[float, float, float], x: Tensor) -> Tensor:
    """The layer (B, 1, H, W) in a colour, or in its grey for grey images `x`."""
    painted = (layer * layer.new_tensor(colour)[:, None, None]).clamp(0, 1)
    return luminance(painted) if x.shape[1] == 1 else painted


def relief(drops: Tensor) -> Tensor:
    """(B, 1, H, W) levels of light on drops, lit from a corner: the slope of the equalised distance to their edge."""
    mean = torch.full((3, 3), 1 / 9)
    distance = (stencil(distances(edges(drops)).clamp(max=FAR), mean) + 1e-4).floor()
    lit = stencil(equalised(distance), torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])).clamp(0, 255)
    return (stencil(lit, mean) + 0.5).floor()


def edges(x: Tensor) -> Tensor:
    """(B, 1, H, W) bool: where levels are steep, and steepest across their direction (Canny 1986)."""
    padded = pad(x, 1, "nearest")
    rows = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    columns = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    right, down = rows[..., 2:] - rows[..., :-2], columns[..., 2:, :] - columns[..., :-2, :]
    steep = right.abs() + down.abs()
    around = F.pad(steep, (1, 1, 1, 1))
    height, width = x.shape[-2:]

    def beside(i: int, j: int) -> Tensor:
        return around[..., 1 + i : 1 + i + height, 1 + j : 1 + j + width]

    flat, upright = down.abs() < 0.41421356 * right.abs(), down.abs() > 2.41421356 * right.abs()
    falling = right * down >= 0
    before = torch.where(falling, beside(-1, -1), beside(-1, 1))
    after = torch.where(falling, beside(1, 1), beside(1, -1))
    top = (steep > before) & (steep > after)
    top = torch.where(upright, (steep > beside(-1, 0)) & (steep >= beside(1, 0)), top)
    top = torch.where(flat, (steep > beside(0, -1)) & (steep >= beside(0, 1)), top)
    return top & (steep > STEEP)


def distances(edge: Tensor) -> Tensor:
    """(B, 1, H, W) pixels to the nearest edge, exact up to FAR and larger beyond."""
    squares = torch.where(edge, 0.0, 4.0 * FAR**2)
    for axis in (-1, -2):
        n = squares.shape[axis]
        around = F.pad(squares, (FAR, FAR, 0, 0) if axis == -1 else (0, 0, FAR, FAR), value=4.0 * FAR**2)
        for offset in range(-FAR, FAR + 1):
            squares = torch.minimum(squares, around.narrow(axis, FAR + offset, n) + offset**2)
    return squares.sqrt()


def equalised(levels: Tensor) -> Tensor:
    """Levels 0 … 255 spread so that each is as frequent as the others, image by image."""
    index = levels.long().flatten(1)
    counts = torch.zeros(len(levels), 256, device=levels.device).scatter_add_(
        1, index, torch.ones_like(levels).flatten(1)
    )
    below = counts.cumsum(1)
    first = below.where(counts > 0, torch.inf).amin(1, keepdim=True)
    table = ((below - first) / (below[:, -1:] - first).clamp(min=1) * 255).round().clamp(0, 255)
    return table.gather(1, index).view_as(levels)
