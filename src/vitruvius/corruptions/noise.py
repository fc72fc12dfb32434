"""Noise of sensors: every pixel for itself.

Hendrycks & Dietterich 2019. B images (B, C, H, W) in [0, 1]; lambda a mean number of photons.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions

CELLS = 1024  # into which [0, 1) is divided, to look photons up


@corruptions.register("gaussian_noise")
class GaussianNoise(Corruption):
    """Normal noise added to every pixel, as in low light."""

    name = "gaussian_noise"
    imagenet = (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation
    cifar = (0.04, 0.06, 0.08, 0.09, 0.10)

    def disturb(self, x: Tensor, dice: Dice, /, std: float) -> Tensor:
        return x + std * dice.normal("noise", x.shape[1:])


@corruptions.register("speckle_noise")
class SpeckleNoise(Corruption):
    """Normal noise in proportion to every pixel."""

    name = "speckle_noise"
    imagenet = (0.15, 0.2, 0.35, 0.45, 0.6)  # standard deviation for a white pixel
    cifar = (0.06, 0.1, 0.12, 0.16, 0.2)

    def disturb(self, x: Tensor, dice: Dice, /, std: float) -> Tensor:
        return x + x * std * dice.normal("noise", x.shape[1:])


@corruptions.register("impulse_noise")
class ImpulseNoise(Corruption):
    """Salt and pepper: some values become black or white, channel by channel."""

    name = "impulse_noise"
    imagenet = (0.03, 0.06, 0.09, 0.17, 0.27)  # share of the values
    cifar = (0.01, 0.02, 0.03, 0.05, 0.07)

    def disturb(self, x: Tensor, dice: Dice, /, share: float) -> Tensor:
        hit = dice.uniform("hit", x.shape[1:]) < share
        return torch.where(hit, dice.signs("salt", x.shape[1:]), x)  # -1 is cut to black


@corruptions.register("shot_noise")
class ShotNoise(Corruption):
    """Photons are counted: a Poisson number in place of every pixel."""

    name = "shot_noise"
    imagenet = (60, 25, 12, 5, 3)  # photons of a white pixel
    cifar = (500, 250, 100, 75, 50)

    def disturb(self, x: Tensor, dice: Dice, /, photons: int) -> Tensor:
        level = (x * 255).round().long()
        return poisson(level, dice.uniform("photons", x.shape[1:]), photons).to(x.dtype) / photons


def poisson(level: Tensor, u: Tensor, photons: int) -> Tensor:
    """Poisson numbers of mean λ = `level` / 255 × `photons`, by inverting the distribution at `u` in [0, 1).

    What is the same in a whole cell of `u` is looked up, the rest is searched for.
    """
    table, cells = _inverse(photons, level.device)
    count = cells.take(level * CELLS + (u * CELLS).long())
    unsure = (count < 0).nonzero(as_tuple=True)
    wanted = level[unsure]
    found = torch.searchsorted(table, u[unsure].double() + wanted, right=True) - wanted * (len(table) // 256)
    count[unsure] = found.short()
    return count


@lru_cache(maxsize=10)
def _inverse(photons: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Level + P(at most n photons) for all levels and n, ascending; and n by cells of P, -1 where it differs in one."""
    most = int(photons + 12 * photons**0.5 + 12)
    count = torch.arange(most, dtype=torch.float64, device=device)
    level = torch.arange(256, dtype=torch.float64, device=device)[:, None]
    lam = level * (photons / 255)
    log_probability = torch.xlogy(count, lam) - lam - torch.lgamma(count + 1)
    below = log_probability.exp().cumsum(1).clamp(max=1)  # (256, most)
    below[:, -1] = 1
    table = (below + level).flatten()
    edge = level + torch.arange(CELLS, dtype=torch.float64, device=device) / CELLS  # (256, CELLS): where cells begin
    least = torch.searchsorted(table, edge, right=True)
    same = least == torch.searchsorted(table, edge + 1 / CELLS)
    return table, torch.where(same, least - level.long() * most, -1).short()
