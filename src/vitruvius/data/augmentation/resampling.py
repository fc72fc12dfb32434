"""Crops that are resized, and affine maps, of batches: each image with its own box or matrix, equal to Pillow's.

Resizing is two products with matrices, one per axis, whose rows are Pillow's filters: horizontal first, rounded to
levels in between (Pillow 13 takes the vertical one first where it shrinks, which rounds differently). Affine maps look
between pixels.   `x` holds levels, float32 (B, C, H, W) of whole numbers 0 … 255
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)
FILTERS = {
    "nearest": NEAREST,
    "bilinear": BILINEAR,
    "bicubic": BICUBIC,
    "box": BOX,
    "hamming": HAMMING,
    "lanczos": LANCZOS,
}


def resized_crop(
    x: Tensor, box: Tensor, filters: Tensor, size: tuple[int, int], kinds: list[int], mirrored: Tensor
) -> Tensor:
    """The box of each image, resized; as Pillow's crop followed by resize, then mirrored.

    x: (B, C, H, W) levels or uint8.
    box: (B, 4) top, left, height, width, whole pixels.
    filters: (B,) which filter resizes each image, one of `kinds`.
    size: height and width of the result.
    kinds: the filters that occur, for which weights are made.
    mirrored: (B, 2) whether the result is mirrored top-bottom and left-right.
    """
    height, width = x.shape[-2:]
    top, left, tall, wide = box.to(torch.float32).unbind(1)
    down = axis_weights(top, tall, height, size[0], filters, kinds, mirrored[:, 0])  # (B, h, H)
    across = axis_weights(left, wide, width, size[1], filters, kinds, mirrored[:, 1])  # (B, w, W)
    rows = x.to(torch.float32).flatten(1, 2) @ across.transpose(1, 2)  # (B, C·H, w)
    rows = to_levels(rows).unflatten(1, (x.shape[1], height))  # (B, C, H, w)
    return to_levels(down.unsqueeze(1) @ rows)


def to_levels(x: Tensor) -> Tensor:
    """Rounded half up and cut to 0 … 255, in place."""
    return x.add_(0.5).floor_().clamp_(0, 255)


def axis_weights(
    start: Tensor, length: Tensor, pixels: int, size: int, filters: Tensor, kinds: list[int], mirrored: Tensor
) -> Tensor:
    """(B, size, pixels): what each new pixel takes of each old one, along one axis; rows add up to 1."""
    out = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    out = torch.where(mirrored[:, None], size - out, out)  # (B, size)
    scale = (length / size)[:, None]
    centre = (out * scale + start[:, None])[:, :, None]  # (B, size, 1)
    old = torch.arange(pixels, device=start.device, dtype=torch.float32) + 0.5
    stretch = scale.clamp(min=1)[:, :, None]  # shrinking averages over more pixels
    distance = (old - centre) / stretch  # (B, size, pixels)
    weights = FILTER_FUNCTIONS[kinds[0]](distance, stretch)
    for kind in kinds[1:]:
        chosen = (filters == kind)[:, None, None]
        weights = torch.where(chosen, FILTER_FUNCTIONS[kind](distance, stretch), weights)
    begin, end = start[:, None, None], (start + length)[:, None, None]
    weights = weights * ((old > begin) & (old < end))
    return weights / weights.sum(2, keepdim=True)


def _nearest(distance: Tensor, stretch: Tensor) -> Tensor:
    """One old pixel: the one that contains the new one's centre."""
    offset = distance * stretch
    return ((offset > -0.5) & (offset <= 0.5)).to(distance.dtype)


def _bilinear(distance: Tensor, _: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp_(min=0)


def _bicubic(distance: Tensor, _: Tensor) -> Tensor:
    """Keys' cubic with a = -1/2."""
    t = distance.abs()
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    return torch.where(t < 1, near, torch.where(t < 2, far, torch.zeros_like(t)))


def _box(distance: Tensor, _: Tensor) -> Tensor:
    return ((distance > -0.5) & (distance <= 0.5)).to(distance.dtype)


def _hamming(distance: Tensor, _: Tensor) -> Tensor:
    window = 0.54 + 0.46 * torch.cos(torch.pi * distance)
    return torch.where(distance.abs() < 1, torch.sinc(distance) * window, torch.zeros_like(distance))


def _lanczos(distance: Tensor, _: Tensor) -> Tensor:
    weights = torch.sinc(distance) * torch.sinc(distance / 3)
    return torch.where(distance.abs() < 3, weights, torch.zeros_like(distance))


FILTER_FUNCTIONS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    NEAREST: _nearest,
    BILINEAR: _bilinear,
    BICUBIC: _bicubic,
    BOX: _box,
    HAMMING: _hamming,
    LANCZOS: _lanczos,
}


def crop(x: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, height, width): a piece of each image, from its own corner, (B,) whole pixels."""
    rows = top[:, None] + torch.arange(size[0], device=x.device)  # (B, height)
    columns = left[:, None] + torch.arange(size[1], device=x.device)  # (B, width)
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    return x.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def affine(x: Tensor, matrix: Tensor, fill: Tensor, kind: int) -> Tensor:
    """Each image seen through its own affine map, as Pillow's `transform`; what lies outside is filled.

    x: (B, C, H, W) levels.
    matrix: (B, 6) a, b, c, d, e, f: the new pixel (u, v) shows the old place (a·u + b·v + c, d·u + e·v + f).
    fill: (C,) levels.
    kind: NEAREST, BILINEAR or BICUBIC.
    """
    height, width = x.shape[-2:]
    u = torch.arange(width, device=x.device, dtype=torch.float32) + 0.5
    v = torch.arange(height, device=x.device, dtype=torch.float32)[:, None] + 0.5
    a, b, c, d, e, f = (number[:, None, None] for number in matrix.to(torch.float32).unbind(1))
    column = a * u + b * v + c  # (B, H, W)
    row = d * u + e * v + f
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    if kind == NEAREST:
        seen = _at(x, row.floor().long(), column.floor().long())
    elif kind == BILINEAR:
        grid = torch.stack([2 * column / width - 1, 2 * row / height - 1], -1)
        seen = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    else:
        seen = _bicubic_sample(x, row - 0.5, column - 0.5)
    seen = (seen + 1e-3).floor_().clamp_(0, 255)  # Pillow cuts; the 1/1000 keeps whole numbers from rounding noise
    return torch.where(inside[:, None], seen, fill.to(x.dtype)[:, None, None])


def rotation_matrix(degrees: Tensor, height: int, width: int) -> Tensor:
    """(B, 6): counter-clockwise about the middle of the image, as Pillow's `rotate`."""
    angle = -torch.deg2rad(degrees.double())
    cos, sin = torch.cos(angle), torch.sin(angle)
    centre_x, centre_y = width / 2, height / 2
    shift_x = centre_x - cos * centre_x - sin * centre_y
    shift_y = centre_y + sin * centre_x - cos * centre_y
    return torch.stack([cos, sin, shift_x, -sin, cos, shift_y], 1)


def _bicubic_sample(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """(B, C, H, W) at (B, H, W) places between the centres of pixels; Keys' cubic with a = -1, as in Pillow's maps."""
    first_row, first_column = row.floor(), column.floor()
    down = _cubic_weights(row - first_row)
    across = _cubic_weights(column - first_column)
    total = torch.zeros_like(x)
    for i, weight in enumerate(down):
        line = torch.zeros_like(x)
        for j, share in enumerate(across):
            line += share[:, None] * _at(x, first_row.long() + i - 1, first_column.long() + j - 1)
        total += weight[:, None] * line
    return total


def _cubic_weights(d: Tensor) -> list[Tensor]:
    """Of the pixel before, at, after and next after a place, d beyond the second."""
    d2 = d * d
    d3 = d2 * d
    return [2 * d2 - d - d3, 1 - 2 * d2 + d3, d + d2 - d3, d3 - d2]


def _at(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Pixels by row and column (B, H, W), those outside taken from the edge."""
    height, width = x.shape[-2:]
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    flat = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, flat).view(*x.shape[:2], *index.shape[1:])
