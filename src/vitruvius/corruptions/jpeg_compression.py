"""JPEG: the loss of a compressed file. Hendrycks & Dietterich 2019; ITU-T T.81, JFIF.

On a CPU the file is made and read again in memory by libjpeg, as in the published sets. Elsewhere no file is needed:
only rounding loses anything in JPEG, the coding of the rounded numbers does not, so it is left out, and a whole batch
is done at once. Colour is stored at half the width and height (4:2:0) and spread again with weights 3:1, as libjpeg
does by default; now and then a coefficient rounds otherwise than by libjpeg's whole-number cosines.
B images (B, C, H, W); blocks of 8 × 8.
"""

from __future__ import annotations

import io
import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import Corruption, corruptions

MODES = {1: "L", 3: "RGB"}  # Pillow's names, by the number of channels

LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)  # T.81, table K.1
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)  # table K.2


@corruptions.register("jpeg_compression")
class JPEGCompression(Corruption):
    """The loss of a JPEG file of low quality."""

    name = "jpeg_compression"
    gives_levels = True
    imagenet = (25, 18, 15, 10, 7)  # quality, of 100
    cifar = (80, 65, 58, 50, 40)

    def disturb(self, x: Tensor, dice: Dice, /, quality: int) -> Tensor:
        levels = (x * 255).round()
        if x.device.type == "cpu":
            return by_libjpeg(levels, quality).div_(255)
        return by_arithmetic(levels, quality) / 255


def by_libjpeg(levels: Tensor, quality: int) -> Tensor:
    """What libjpeg leaves of images (B, C, H, W) of levels 0 … 255, on the CPU; `quality` is 1 to 100."""
    result = torch.empty_like(levels, memory_format=torch.contiguous_format)
    for image, place in zip(levels.numpy().astype(np.uint8), result, strict=True):
        picture = Image.merge(MODES[len(image)], [Image.fromarray(plane) for plane in image])
        with io.BytesIO() as file:
            picture.save(file, "JPEG", quality=quality)
            with Image.open(file) as read:
                decoded = torch.from_numpy(np.array(read))  # (H, W, C), or (H, W)
        place.copy_(decoded.view(*decoded.shape[:2], -1).movedim(-1, 0))
    return result


def by_arithmetic(levels: Tensor, quality: int) -> Tensor:
    """The same by arithmetic, on any device."""
    if levels.shape[1] == 1:
        return coded(levels, quality, LUMINANCE)
    y, cb, cr = to_ycc(levels)
    y = coded(y, quality, LUMINANCE)
    colour = coded(halved(_padded(torch.cat((cb, cr), 1), 2, 16)), quality, CHROMINANCE)
    height, width = levels.shape[-2:]
    colour = colour[..., : (height + 1) // 2, : (width + 1) // 2]  # what was padded is not spread
    return to_rgb(y, doubled(colour)[..., :height, :width])


def to_ycc(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Brightness and two colour differences, whole numbers 0 … 255, each (B, 1, H, W)."""
    r, g, b = rgb.split(1, 1)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    cb = 128 - 0.168735892 * r - 0.331264108 * g + 0.5 * b
    cr = 128 + 0.5 * r - 0.418687589 * g - 0.081312411 * b
    return _whole(y), _whole(cb), _whole(cr)


def to_rgb(y: Tensor, colour: Tensor) -> Tensor:
    """(B, 3, H, W) of brightness `y` (B, 1, H, W) and the two differences `colour` (B, 2, H, W), all 0 … 255."""
    cb, cr = (colour - 128).split(1, 1)
    return _whole(torch.cat((y + 1.402 * cr, y - 0.344136286 * cb - 0.714136286 * cr, y + 1.772 * cb), 1))


def coded(x: Tensor, quality: int, base: tuple[tuple[int, ...], ...]) -> Tensor:
    """What is left of planes (B, C, H, W) when cosine coefficients of blocks are rounded to multiples of steps.

    `base` is the table of 8 × 8 steps at quality 50.
    """
    height, width = x.shape[-2:]
    blocks = _padded(x, 8, 8).unflatten(-2, (-1, 8)).unflatten(-1, (-1, 8)).transpose(-3, -2)  # (B, C, h, w, 8, 8)
    basis, table = cosines(x), steps(x, quality, base)
    ratio = (basis @ (blocks - 128) @ basis.T * 8).round() / (8 * table)  # libjpeg's cosines end at eighths
    rounded = ratio.sign() * (ratio.abs() + 0.5 + 1e-4).floor()  # halves go outwards, whatever the rounding noise
    plane = (basis.T @ (rounded * table) @ basis + 128).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return _whole(plane)[..., :height, :width]


def steps(like: Tensor, quality: int, base: tuple[tuple[int, ...], ...]) -> Tensor:
    """(8, 8) steps of the coefficients at a quality from 1 to 100, as libjpeg scales the tables."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((like.new_tensor(base) * percent + 50) / 100).floor().clamp(1, 255)


def cosines(like: Tensor) -> Tensor:
    """(8, 8) orthonormal cosine basis, one frequency a row."""
    frequency, place = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    basis = ((2 * place + 1) * frequency * math.pi / 16).cos() / 2
    basis[0] /= math.sqrt(2)
    return basis.to(like)


def halved(x: Tensor) -> Tensor:
    """Means of 2 × 2 pixels; what lies between two levels goes down and up in turn."""
    total = x[..., ::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, ::2] + x[..., 1::2, 1::2]
    turn = 1 + torch.arange(total.shape[-1], device=x.device) % 2
    return ((total + turn) / 4).floor()


def doubled(x: Tensor) -> Tensor:
    """Twice the size: each pixel three quarters its own, one quarter its neighbour's, on both axes."""
    above, below = (F.pad(x, (0, 0, 1, 1), mode="replicate")[..., start : start + x.shape[-2], :] for start in (0, 2))
    rows = torch.stack((3 * x + above, 3 * x + below), -2).flatten(-3, -2)
    left, right = (F.pad(rows, (1, 1, 0, 0), mode="replicate")[..., start : start + x.shape[-1]] for start in (0, 2))
    return torch.stack(((3 * rows + left + 8) / 16, (3 * rows + right + 7) / 16), -1).floor().flatten(-2)


def _padded(x: Tensor, height: int, width: int) -> Tensor:
    """The last row and column repeated up to multiples of these."""
    return F.pad(x, (0, -x.shape[-1] % width, 0, -x.shape[-2] % height), mode="replicate")


def _whole(x: Tensor) -> Tensor:
    return (x + 0.5 + 1e-4).floor().clamp(0, 255)
