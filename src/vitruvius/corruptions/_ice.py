"""Frost drawn by chance: needles along a wandering direction, over clouds of thicker and thinner ice.

Needles are white noise averaged along a line (Cabral & Leedom 1993). Brightness, contrast and tint are those of the
six photographs behind ImageNet-C on average: means 0.42 to 0.82, deviation about 0.13, a little blue.  B images.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.corruptions._resampling import take

TINT = (0.87, 1.02, 1.11)  # red, green, blue of the photographs, against their mean
NEEDLE = 14  # pixels to either side, at the photographs' size
CLOUD = 90  # pixels between thick and thin ice


def ice(dice: Dice, size: tuple[int, int], shrink: int) -> Tensor:
    """(B, 3, H, W) textures in [0, 1]; `shrink` makes every detail so many times smaller."""
    clouds = 0.6 * cloud(dice, size, CLOUD / shrink, 0) + 0.4 * cloud(dice, size, CLOUD / 3 / shrink, 1)
    turn = 2 * math.pi * cloud(dice, size, 2 * CLOUD / shrink, 2)
    length = max(NEEDLE // shrink, 1)
    stems, branches = (_standard(streaks(dice, turn + number * math.pi / 3, length, number)) for number in (0, 1))
    relief = _standard(_standard(stems + branches) * (0.35 + clouds) + 1.2 * _standard(clouds))
    mean = 0.42 + 0.4 * dice.uniform("mean", (1, 1, 1))
    level = mean + 0.14 * relief
    return (level * level.new_tensor(TINT)[:, None, None]).clamp(0, 1)


def cloud(dice: Dice, size: tuple[int, int], wide: float, step: int) -> Tensor:
    """(B, 1, H, W) smooth noise in [0, 1] whose hills are `wide` pixels apart."""
    cells = [math.ceil(n / wide) + 3 for n in size]
    noise = dice.uniform("clouds", (1, *cells), step)
    fine = F.interpolate(noise, size=[math.ceil(c * wide) for c in cells], mode="bicubic", align_corners=False)
    start = math.ceil(wide)
    return fine[..., start : start + size[0], start : start + size[1]].clamp(0, 1)


def streaks(dice: Dice, angle: Tensor, length: int, step: int) -> Tensor:
    """(B, 1, H, W) white noise averaged along a line through each pixel, `length` pixels to either side."""
    height, width = angle.shape[-2:]
    noise = dice.uniform("needles", (1, height, width), step)
    rows, columns = (torch.arange(n, device=angle.device) for n in (height, width))
    down, right = angle[:, 0].sin(), angle[:, 0].cos()  # (B, H, W)
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
