"""Frost on the window: the image under a layer of ice crystals. Hendrycks & Dietterich 2019.

The published sets lay photographs of frost over the images; those are not ours to give away, so `ice` draws a texture
for every image, of their brightness, contrast and tint on average. `textures` names a folder with the original files,
which are then used instead. B images (B, C, H, W).
"""

from __future__ import annotations

import functools
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
from vitruvius.corruptions._ice import ice
from vitruvius.corruptions.snow import luminance

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@corruptions.register("frost")
@dataclass(frozen=True, kw_only=True)
class Frost(Corruption):
    """Ice crystals on the window: drawn by chance, or photographs from a folder of `textures`."""

    name: ClassVar[str] = "frost"
    imagenet: ClassVar = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))  # shares of image and ice
    cifar: ClassVar = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))

    textures: str | None = None  # folder with photographs of frost

    def disturb(self, x: Tensor, dice: Dice, /, image: float, share: float) -> Tensor:
        size = (x.shape[-2], x.shape[-1])
        shrink = 5 if self.is_small(x) else 1  # CIFAR-10-C shrinks the photographs to a fifth
        if self.textures is None:
            layer = ice(dice, size, shrink)
        else:
            layer = cut(read_textures(self.textures, size, shrink), dice, size)
        return image * x + share * (luminance(layer) if x.shape[1] == 1 else layer)


def cut(textures: tuple[Tensor, ...], dice: Dice, size: tuple[int, int]) -> Tensor:
    """(B, 3, H, W): a random place of a random texture for every image."""
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
    textures = []
    for file in files:
        try:
            with Image.open(file) as photograph:
                pixels = torch.from_numpy(np.array(photograph.convert("RGB"))).movedim(-1, 0).float() / 255
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{file} cannot be read as an image: {error}") from error
        factor = max(1 / shrink, *(side / n for side, n in zip(size, pixels.shape[-2:], strict=True)))
        shape = [max(round(n * factor), side) for side, n in zip(size, pixels.shape[-2:], strict=True)]
        resized = F.interpolate(pixels[None], size=shape, mode="bilinear", align_corners=False, antialias=shrink == 1)
        textures.append(resized[0].clamp(0, 1))
    return tuple(textures)
