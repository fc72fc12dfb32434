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

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions
from vitruvius.corruptions.filters import pad
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

    name = "frost"
    imagenet = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))  # weights of image and ice
    cifar = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))

    textures: str | None = None  # folder with photographs of frost

    def disturb(self, x: Tensor, dice: Dice, /, image: float, share: float) -> Tensor:
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
    """(B, 3, H, W): a random place of a random texture (3, h, w) for every image."""
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
    """The images (3, h, w) of a folder in order of their names, shrunk, and enlarged where smaller than `size`."""
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
    """(B, 3, H, W) textures in [0, 1]; `shrink` makes every detail that many times smaller."""
    aims, aim, shade = feathers(dice, size, FEATHER / shrink)
    needles = _standard(streaks(dice, aims, aim, max(NEEDLE // shrink, 1)))
    clouds = _standard(cloud(dice, size, CLOUD / shrink))
    relief = _standard(needles + 0.8 * _standard(shade) + 0.8 * clouds)
    mean = 0.38 + 0.42 * dice.uniform("mean", (1, 1, 1))
    level = mean + 0.13 * relief
    return (level * level.new_tensor(TINT)[:, None, None]).clamp(0, 1)


def feathers(dice: Dice, size: tuple[int, int], wide: float) -> tuple[Tensor, Tensor, Tensor]:
    """All directions of needles (A); which of them a pixel has, and how bright it is (B, 1, H, W): by its nearest seed.

    A needle lies off the axis of its seed, to its left or right; seeds are `wide` pixels apart.
    """
    grid = (math.ceil(size[0] / wide) + 2, math.ceil(size[1] / wide) + 2)
    seeds = dice.uniform("seeds", (4, *grid))  # (B, 4, G, G): place in the cell, direction of the axis, brightness
    rows, columns = (torch.arange(n, device=seeds.device) / wide + 1 for n in size)
    number = _nearest_seed(seeds[:, :2], rows, columns)  # (B, H, W), among the seeds of all images
    place_y, place_x, turn, light = seeds.transpose(0, 1).flatten(1)  # (B · G · G)
    axis = 2 * math.pi * turn
    cell = torch.arange(grid[0] * grid[1], device=seeds.device).repeat(len(seeds))
    down = rows[:, None] - _of(cell // grid[1] + place_y, number)
    right = columns - _of(cell % grid[1] + place_x, number)
    on_right = right * _of(axis.sin(), number) > down * _of(axis.cos(), number)
    aims = torch.stack([axis + math.pi / 3.5, axis - math.pi / 3.5], 1).flatten()  # left and right of every seed
    aim = 2 * number + on_right
    shade = _of(light, number) - 0.7 * down.hypot(right)
    return aims, aim[:, None], shade[:, None]


def _nearest_seed(places: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, H, W) int32: the number of the nearest of all seeds, image by image, row by row.

    `places` (B, 2, G, G) are the seeds' places in their cells, `rows` (H) and `columns` (W) the pixels', in cells,
    which have neighbours on all sides.
    """
    images, _, high, wide = places.shape
    nearest = places.new_full((images, len(rows), len(columns)), torch.inf)
    chosen = torch.zeros_like(nearest, dtype=torch.uint8)  # of the nine seeds around, counted by rows
    for neighbour in range(9):
        row = rows.long() + (neighbour // 3 - 1)
        column = columns.long() + (neighbour % 3 - 1)
        y, x = places.index_select(3, column).unbind(1)  # (B, G, W)
        across = (columns - column - x).square_()
        distance = ((rows - row)[:, None] - y.index_select(1, row)).square_().add_(across.index_select(1, row))
        chosen.masked_fill_(distance < nearest, neighbour)
        nearest = torch.minimum(nearest, distance)
    offsets = [(i - 1) * wide + j - 1 for i in range(3) for j in range(3)]
    cell = (rows.long()[:, None] * wide + columns.long()).int()  # (H, W)
    first = torch.arange(images, device=places.device, dtype=torch.int32).view(-1, 1, 1) * (high * wide)
    return _of(cell.new_tensor(offsets), chosen.int()).add_(cell).add_(first)


def _of(values: Tensor, number: Tensor) -> Tensor:
    """Values (N) by number, of any shape."""
    return values.index_select(0, number.flatten()).view(number.shape)


def cloud(dice: Dice, size: tuple[int, int], wide: float) -> Tensor:
    """(B, 1, H, W) smooth noise whose hills are `wide` pixels apart."""
    rows, columns = (_cubic(n, wide, dice.ids.device) for n in size)
    noise = dice.uniform("clouds", (1, rows.shape[1], columns.shape[1]))
    return rows @ noise @ columns.T


@functools.lru_cache(maxsize=8)
def _cubic(n: int, wide: float, device: torch.device) -> Tensor:
    """(n, cells): what every pixel takes of cells that are `wide` pixels apart, by bicubic interpolation."""
    cells = math.ceil(n / wide) + 3
    every = torch.eye(cells, device=device)[None, None]
    fine = F.interpolate(every, size=(math.ceil(cells * wide), cells), mode="bicubic", align_corners=False)
    start = math.ceil(wide)
    return fine[0, 0, start : start + n].clone()


def streaks(dice: Dice, aims: Tensor, aim: Tensor, length: int) -> Tensor:
    """(B, 1, H, W) white noise averaged along a line through each pixel, `length` pixels to either side.

    `aims` (A) are angles in radians, of which `aim` (B, 1, H, W) says each pixel's.
    """
    images, _, height, width = aim.shape
    noise = pad(dice.uniform("needles", (1, height, width)), length, "wrap")  # (B, 1, H + 2 length, W + 2 length)
    every = noise.flatten()
    wide = noise.shape[-1]
    rows, columns = (torch.arange(n, device=aim.device, dtype=torch.int32) for n in (height, width))
    first = torch.arange(images, device=aim.device, dtype=torch.int32).view(-1, 1, 1, 1) * noise[0].numel()
    here = first + (rows[:, None] + length) * wide + columns + length  # (B, 1, H, W): a pixel's number in `every`
    total = _of(every, here)
    for along in range(1, length + 1):
        away = (along * aims.sin()).round().int() * wide + (along * aims.cos()).round().int()  # (A)
        there = _of(away, aim)
        total += _of(every, here + there)
        total += _of(every, here - there)
    return total


def _standard(x: Tensor) -> Tensor:
    """Mean 0, deviation 1, image by image."""
    centred = x - x.mean((-2, -1), keepdim=True)
    return centred / centred.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-6)
