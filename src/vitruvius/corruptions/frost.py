"""Frost on the window: the image under a layer of ice crystals. Hendrycks & Dietterich 2019.

The published sets lay photographs of frost over the images; those are not ours to give away, so `ice` draws a texture
for every image, of their brightness, contrast and tint on average. `textures` names a folder with the original files,
which are then used instead.

Drawn frost is feathers of needles that grow from scattered seeds, over clouds of thicker and thinner ice. Needles are
white noise averaged along a line (Cabral & Leedom 1993); seeds and their cells are Worley's (1996). Brightness,
contrast and tint are those of the six photographs behind ImageNet-C on average: means 0.38 to 0.8, deviation about
0.13, a little blue. B images (B, C, H, W), cells G × G.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius._errors import DataError
from vitruvius.corruptions._base import Corruption, corruptions
from vitruvius.corruptions._resampling import take
from vitruvius.corruptions.snow import luminance

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TINT = (0.87, 1.02, 1.11)  # red, green, blue of the photographs, against their mean
NEEDLE = 12  # pixels to either side, at the photographs' size
FEATHER = 55  # pixels between seeds
CLOUD = 90  # pixels between thick and thin ice


@corruptions.register("frost")
@dataclass(frozen=True, kw_only=True)
class Frost(Corruption):
    """Ice crystals on the window: drawn by chance, or photographs from a folder of `textures`."""

    name: ClassVar[str] = "frost"
    imagenet: ClassVar = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))  # shares of image and ice
    cifar: ClassVar = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))

    textures: str | None = None  # folder with photographs of frost

    def disturb(self, x: Tensor, dice: Dice, /, image: float, share: float) -> Tensor:
        """`image` and `share` are the weights of the image and of the ice."""
        size = (x.shape[-2], x.shape[-1])
        shrink = 5 if self.is_small(x) else 1  # CIFAR-10-C shrinks the photographs to a fifth
        if self.textures is None:
            layer = ice(dice, size, shrink)
        else:
            layer = cut(read_textures(self.textures, size, shrink), dice, size)
        if x.shape[1] == 1:
            layer = luminance(layer)
        return image * x + share * layer


def cut(textures: tuple[Tensor, ...], dice: Dice, size: tuple[int, int]) -> Tensor:
    """(B, 3, H, W): a random place of a random texture for every image.

    `textures` are (3, h, w), each at least as large as `size`, (height, width) in pixels; `dice` chooses texture and
    place.
    """
    chosen = dice.integers("texture", len(textures))
    start = dice.uniform("place", (2,))
    layer = torch.empty(len(chosen), 3, *size, device=chosen.device)
    for number, texture in enumerate(textures):
        mine = (chosen == number).nonzero()[:, 0]
        room = torch.tensor([texture.shape[-2] - size[0] + 1, texture.shape[-1] - size[1] + 1], device=chosen.device)
        corner = (start[mine] * room).long()  # (b, 2)
        rows = corner[:, 0, None] + torch.arange(size[0], device=chosen.device)
        columns = corner[:, 1, None] + torch.arange(size[1], device=chosen.device)
        pixels = texture.to(chosen.device)[:, rows[:, :, None], columns[:, None, :]]  # (3, b, H, W)
        layer[mine] = pixels.transpose(0, 1)
    return layer


@functools.lru_cache(maxsize=8)
def read_textures(folder: str, size: tuple[int, int], shrink: int) -> tuple[Tensor, ...]:
    """The images (3, h, w) of a folder in order of their names, shrunk, and enlarged where smaller than `size`.

    `folder` holds PNG or JPEG files; `size` is (height, width) in pixels; `shrink` divides the sides of the
    photographs.
    """
    files = sorted(file for file in Path(folder).expanduser().glob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"no images of frost in {folder}; expected png or jpg files, such as frost1.png.")
    return tuple(_read_texture(file, size, shrink) for file in files)


def _read_texture(file: Path, size: tuple[int, int], shrink: int) -> Tensor:
    try:
        with Image.open(file) as photograph:
            pixels = torch.from_numpy(np.array(photograph.convert("RGB"))).movedim(-1, 0).float() / 255
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}") from error
    factor = max(1 / shrink, *(side / n for side, n in zip(size, pixels.shape[-2:], strict=True)))
    shape = [max(round(n * factor), side) for side, n in zip(size, pixels.shape[-2:], strict=True)]
    resized = F.interpolate(pixels[None], size=shape, mode="bilinear", align_corners=False, antialias=shrink == 1)
    return resized[0].clamp(0, 1)


def ice(dice: Dice, size: tuple[int, int], shrink: int) -> Tensor:
    """(B, 3, H, W) textures in [0, 1]; `shrink` makes every detail that many times smaller.

    `dice` draws one texture per image; `size` is (height, width) in pixels.
    """
    direction, shade = feathers(dice, size, FEATHER / shrink)
    needles = _standard(streaks(dice, direction, max(NEEDLE // shrink, 1)))
    clouds = _standard(cloud(dice, size, CLOUD / shrink))
    relief = _standard(needles + 0.8 * _standard(shade) + 0.8 * clouds)
    mean = 0.38 + 0.42 * dice.uniform("mean", (1, 1, 1))
    level = mean + 0.13 * relief
    return (level * level.new_tensor(TINT)[:, None, None]).clamp(0, 1)


def feathers(dice: Dice, size: tuple[int, int], wide: float) -> tuple[Tensor, Tensor]:
    """Direction of the needles and brightness (B, 1, H, W): off the axis of the nearest seed, to its left or right.

    `dice` places the seeds; `size` is (height, width) and `wide` the distance of seeds, in pixels.
    """
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
    """(B, 1, H, W) smooth noise whose hills are `wide` pixels apart. `dice` draws them; `size` is (height, width)."""
    cells = [math.ceil(n / wide) + 3 for n in size]
    noise = dice.uniform("clouds", (1, *cells))
    fine = F.interpolate(noise, size=[math.ceil(c * wide) for c in cells], mode="bicubic", align_corners=False)
    start = math.ceil(wide)
    return fine[..., start : start + size[0], start : start + size[1]]


def streaks(dice: Dice, direction: Tensor, length: int) -> Tensor:
    """(B, 1, H, W) white noise averaged along a line through each pixel, `length` pixels to either side.

    `dice` draws the noise; `direction` (B, 1, H, W) is the angle of the line at each pixel, in radians.
    """
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
