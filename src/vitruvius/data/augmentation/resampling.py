"""Crops that are resized, and affine maps, of batches: each image with its own box or matrix, equal to Pillow's.

Resizing is two products with matrices, one per axis, whose rows are Pillow's filters: horizontal first, rounded to
levels in between (Pillow 13 takes the vertical one first where it shrinks, which rounds differently). Affine maps look
between pixels.   `x` holds levels, float32 (B, C, H, W) of whole numbers 0 … 255
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitruvius.corruptions.filters import take

NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)
SUPPORT = {NEAREST: 0.5, BILINEAR: 1.0, BICUBIC: 2.0, BOX: 0.5, HAMMING: 1.0, LANCZOS: 3.0}  # pixels to either side
FILTERS = {name: kind for kind, name in enumerate(("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"))}


def resized_crop(
    x: Tensor,
    box: Tensor,
    filters: Tensor,
    mirrored: Tensor,
    *,
    size: tuple[int, int],
    kinds: list[int],
    taps: tuple[int, int],
) -> Tensor:
    """The box of each image, resized; as Pillow's crop followed by resize, then mirrored.

    x: (B, C, H, W) levels or uint8.
    box: (B, 4) top, left, height, width, whole pixels.
    filters: (B,) which filter resizes each image, one of `kinds`.
    mirrored: (B, 2) whether the result is mirrored top-bottom and left-right.
    size: height and width of the result.
    taps: how many old pixels a new one may take, down and across, from `taps_of`.
    """
    top, left, tall, wide = box.to(torch.float32).unbind(1)
    height, width = x.shape[-2:]
    down = axis_weights(top, tall, filters, mirrored[:, 0], kinds, pixels=height, size=size[0], taps=taps[0])
    across = axis_weights(left, wide, filters, mirrored[:, 1], kinds, pixels=width, size=size[1], taps=taps[1])
    rows = x.to(torch.float32).flatten(1, 2) @ across.transpose(1, 2)  # (B, C·H, w)
    rows = to_levels(rows).unflatten(1, (x.shape[1], height))  # (B, C, H, w)
    return to_levels(down.unsqueeze(1) @ rows)


def taps_of(box: Tensor, size: tuple[int, int], pixels: tuple[int, int], kinds: list[int]) -> tuple[int, int]:
    """Look at the boxes (B, 4), on the CPU: the more one is shrunk, the more old pixels a new one takes.

    `size` (height, width) of the result, `pixels` of the images; `kinds` are the filters that occur.
    """
    reach = max(SUPPORT[kind] for kind in kinds)
    stretch = [max(1.0, longest / wanted) for longest, wanted in zip(box[:, 2:].amax(0).tolist(), size, strict=True)]
    down, across = (min(have, math.ceil(2 * reach * s) + 1) for have, s in zip(pixels, stretch, strict=True))
    return down, across


def to_levels(x: Tensor) -> Tensor:
    """Rounded half up and cut to 0 … 255, in place."""
    return x.add_(0.5).floor_().clamp_(0, 255)


def axis_weights(
    start: Tensor,
    length: Tensor,
    filters: Tensor,
    mirrored: Tensor,
    kinds: list[int],
    *,
    pixels: int,
    size: int,
    taps: int,
) -> Tensor:
    """(B, size, pixels): what each of `size` new pixels takes of each old one, along one axis; rows add up to 1.

    start, length: (B,) of the box, in pixels.
    """
    out = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    out = torch.where(mirrored[:, None], size - out, out)  # (B, size)
    scale = (length / size)[:, None]
    centre = (out * scale + start[:, None])[:, :, None]  # (B, size, 1)
    first = (centre - taps / 2).round()
    old = first + torch.arange(taps, device=start.device, dtype=torch.float32)  # (B, size, taps), whole pixels
    stretch = scale.clamp(min=1)[:, :, None]  # shrinking averages over more pixels
    distance = (old + 0.5 - centre) / stretch
    weights = FILTER_FUNCTIONS[kinds[0]](distance, stretch)
    for kind in kinds[1:]:
        chosen = (filters == kind)[:, None, None]
        weights = torch.where(chosen, FILTER_FUNCTIONS[kind](distance, stretch), weights)
    begin, end = start[:, None, None], (start + length)[:, None, None]
    weights = weights * ((old >= begin) & (old < end))
    weights = weights / weights.sum(2, keepdim=True)
    dense = weights.new_zeros(len(start), size, pixels)
    return dense.scatter_add_(2, old.clamp_(0, pixels - 1).long(), weights)


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


FILTER_FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]]  # by kind
FILTER_FUNCTIONS = [_nearest, _bilinear, _bicubic, _box, _hamming, _lanczos]


def crop(x: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], upside_down: Tensor, mirrored: Tensor) -> Tensor:
    """(B, C, height, width): a piece of each image, from its own corner, (B,) pixels, mirrored where it says 1."""
    row = torch.arange(size[0], device=x.device)
    column = torch.arange(size[1], device=x.device)
    row = torch.where(upside_down[:, None] > 0, size[0] - 1 - row, row) + top[:, None]  # (B, height)
    column = torch.where(mirrored[:, None] > 0, size[1] - 1 - column, column) + left[:, None]  # (B, width)
    return take(x, row[:, :, None] * x.shape[-1] + column[:, None, :])


def affine(x: Tensor, matrix: Tensor, fill: Tensor, kind: int, axis: int | None = None) -> Tensor:
    """Each image seen through its own affine map, as Pillow's `transform`; what lies outside is filled.

    x: (B, C, H, W) levels.
    matrix: (B, 6) a, b, c, d, e, f: the new pixel (u, v) shows the old place (a·u + b·v + c, d·u + e·v + f).
    fill: (C,) levels.
    kind: NEAREST, BILINEAR or BICUBIC.
    axis: -1 if all maps move pixels along their row only, -2 along their column only; default any map.
    """
    height, width = x.shape[-2:]
    u = torch.arange(width, device=x.device, dtype=torch.float32) + 0.5
    v = torch.arange(height, device=x.device, dtype=torch.float32)[:, None] + 0.5
    a, b, c, d, e, f = (number[:, None, None] for number in matrix.to(torch.float32).unbind(1))
    column = a * u + b * v + c  # (B, H, W)
    row = d * u + e * v + f
    outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
    if kind == NEAREST:
        seen = _sample(x, row, column, [None], [None], reach=0)
    else:
        weights = _linear_weights if kind == BILINEAR else _cubic_weights
        down = [None] if axis == -1 else weights(row - 0.5)
        across = [None] if axis == -2 else weights(column - 0.5)
        seen = _sample(x, row, column, down, across, reach=kind)
    seen = (seen + 1e-3).floor_().clamp_(0, 255)  # Pillow cuts; the 1/1000 keeps whole numbers from rounding noise
    empty = outside.to(x.dtype)[:, None]
    colour = fill.to(x.dtype)[:, None, None]
    return seen.mul_(1 - empty).add_(colour * empty)


def rotation_matrix(degrees: Tensor, height: int, width: int) -> Tensor:
    """(B, 6): counter-clockwise about the middle of the image, as Pillow's `rotate`."""
    angle = -torch.deg2rad(degrees.double())
    cos, sin = torch.cos(angle), torch.sin(angle)
    centre_x, centre_y = width / 2, height / 2
    shift_x = centre_x - cos * centre_x - sin * centre_y
    shift_y = centre_y + sin * centre_x - cos * centre_y
    return torch.stack([cos, sin, shift_x, -sin, cos, shift_y], 1)


Weights = list[Tensor] | list[None]  # (B, H, W) each, one per old pixel in a row; [None]: the one pixel there is


def _sample(x: Tensor, row: Tensor, column: Tensor, down: Weights, across: Weights, *, reach: int) -> Tensor:
    """(B, C, H, W): sums over the old pixels around each place (B, H, W); those outside are taken from the edge.

    One weight looks at the pixel that holds the place, two at those on either side of it, four at two on either side.
    """
    padded = F.pad(x, (reach, reach, reach, reach), mode="replicate") if reach else x
    wide = padded.shape[-1]
    top = _first(row, len(down), x.shape[-2]) + reach
    left = _first(column, len(across), x.shape[-1]) + reach
    index = (top * wide + left).long().flatten(1)[:, None].expand(-1, x.shape[1], -1)
    pixels = padded.flatten(2)
    total = None
    for i, weight in enumerate(down):
        line = None
        for j, share in enumerate(across):
            here = pixels[:, :, i * wide + j :].gather(2, index).view_as(x)  # the same places, seen from further on
            line = _add(line, here, share)
        assert line is not None
        total = _add(total, line, weight)
    assert total is not None
    return total


def _add(total: Tensor | None, values: Tensor, weight: Tensor | None) -> Tensor:
    if weight is not None:
        values = values.mul_(weight[:, None])
    return values if total is None else total.add_(values)


def _first(place: Tensor, taps: int, pixels: int) -> Tensor:
    """The first of this many pixels around a place; a place far outside is moved to the edge."""
    if taps == 1:
        return place.floor().clamp_(0, pixels - 1)
    return (place - 0.5).floor_().clamp_(-1, pixels - 1) - (taps // 2 - 1)


def _linear_weights(place: Tensor) -> list[Tensor]:
    after = place - place.floor()
    return [1 - after, after]


def _cubic_weights(place: Tensor) -> list[Tensor]:
    """Keys' cubic with a = -1, as in Pillow's maps; its cubic for resizing has -1/2."""
    d = place - place.floor()
    d2 = d * d
    d3 = d2 * d
    return [2 * d2 - d - d3, 1 - 2 * d2 + d3, d + d2 - d3, d3 - d2]
