"""Frost drawn by chance: feathers of needles that grow from scattered seeds, over clouds of thicker and thinner ice.

Needles are white noise averaged along a line (Cabral & Leedom 1993); seeds and their cells are Worley's (1996).
Brightness, contrast and tint are those of the six photographs behind ImageNet-C on average: means 0.38 to 0.8,
deviation about 0.13, a little blue. B images, cells G × G.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.corruptions._resampling import take

TINT = (0.87, 1.02, 1.11)  # red, green, blue of the photographs, against their mean
NEEDLE = 12  # pixels to either side, at the photographs' size
FEATHER = 55  # pixels between seeds
CLOUD = 90  # pixels between thick and thin ice


def ice(dice: Dice, size: tuple[int, int], shrink: int) -> Tensor:
    """(B, 3, H, W) textures in [0, 1]; `shrink` makes every detail so many times smaller."""
    direction, shade = feathers(dice, size, FEATHER / shrink)
    needles = _standard(streaks(dice, direction, max(NEEDLE // shrink, 1)))
    clouds = _standard(cloud(dice, size, CLOUD / shrink))
    relief = _standard(needles + 0.8 * _standard(shade) + 0.8 * clouds)
    mean = 0.38 + 0.42 * dice.uniform("mean", (1, 1, 1))
    level = mean + 0.13 * relief
    return (level * level.new_tensor(TINT)[:, None, None]).clamp(0, 1)


def feathers(dice: Dice, size: tuple[int, int], wide: float) -> tuple[Tensor, Tensor]:
    """Direction of the needles and brightness (B, 1, H, W): off the axis of the nearest seed, to its left or right."""
    grid = [math.ceil(n / wide) + 2 for n in size]
    seeds = dice.uniform("seeds", (4, *grid))  # (B, 4, G, G): place in the cell, direction of the axis, brightness
    rows, columns = (torch.arange(n, device=seeds.device) / wide + 1 for n in size)
    nearest = torch.full((len(seeds), *size), torch.inf, device=seeds.device)
    direction, shade = torch.zeros_like(nearest), torch.zeros_like(nearest)
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            row, column = (rows.long() + i).clamp(0, grid[0] - 1), (columns.long() + j).clamp(0, grid[1] - 1)
            y, x, turn, light = seeds[:, :, row[:, None], column].unbind(1)  # (B, H, W)
            down, right = rows[:, None] - row[:, None] - y, columns - column - x
            axis = 2 * math.pi * turn
            side = (right * axis.sin() - down * axis.cos()).sign()
            distance, better = down.hypot(right), down.hypot(right) < nearest
            nearest = torch.where(better, distance, nearest)
            direction = torch.where(better, axis - side * math.pi / 3.5, direction)
            shade = torch.where(better, light - 0.7 * distance, shade)
    return direction[:, None], shade[:, None]


def cloud(dice: Dice, size: tuple[int, int], wide: float) -> Tensor:
    """(B, 1, H, W) smooth noise whose hills are `wide` pixels apart."""
    cells = [math.ceil(n / wide) + 3 for n in size]
    noise = dice.uniform("clouds", (1, *cells))
    fine = F.interpolate(noise, size=[math.ceil(c * wide) for c in cells], mode="bicubic", align_corners=False)
    start = math.ceil(wide)
    return fine[..., start : start + size[0], start : start + size[1]]


def streaks(dice: Dice, direction: Tensor, length: int) -> Tensor:
    """(B, 1, H, W) white noise averaged along a line through each pixel, `length` pixels to either side."""
    height, width = direction.shape[-2:]
    noise = dice.uniform("needles", (1, height, width))
    rows, columns = (torch.arange(n, device=direction.device) for n in (height, width))
    down, right = direction[:, 0].sin(), direction[:, 0].cos()  # (B, H, W)
    total = torch.zeros_like(noise)
    for along in range(-length, length + 1):
        row = (rows[:, None] + along * down).round().long().remainder(height)
        column = (columns + along * right).round().long().remainder(width)
        total += take(noise, row * width + column)
    return total


def _standard(x: Tensor) -> Tensor:
    """Mean 0, deviation 1, image by image."""
    centred = x - x.mean((-2, -1), keepdim=True)
    return centred / centred.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-6)
