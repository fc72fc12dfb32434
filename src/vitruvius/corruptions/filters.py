"""Filters and look-ups between pixels, for batches of images; the same on every device.

Filters are matrices where they separate, by Fourier where not: no convolution of cuDNN's is used, whose reduced
precision would move 8-bit levels.   (…, H, W) images, n pixels a side; B images (B, C, H, W)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def reflect(index: Tensor, n: int) -> Tensor:
    """Whole numbers folded into 0 … n − 1, half a pixel beyond the edge: c b a | a b c | c b a."""
    index = index.remainder(2 * n)
    return torch.where(index < n, index, 2 * n - 1 - index)


def reflect_101(index: Tensor, n: int) -> Tensor:
    """Whole numbers folded into 0 … n − 1 at the middle of the edge pixel: c b | a b c | b a."""
    period = max(2 * (n - 1), 1)
    index = index.remainder(period)
    return torch.where(index < n, index, period - index)


BORDERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "reflect": reflect,
    "reflect_101": reflect_101,
    "nearest": lambda index, n: index.clamp(0, n - 1),  # staying at the edge: a a | a b c | c c
    "wrap": torch.remainder,  # going on at the other side: b c | a b c | a b
}


def gaussian(x: Tensor, sigma: float, *, border: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian filter of the last two axes, cut off at `truncate` sigmas; any sigma, however small the image."""
    if int(truncate * sigma + 0.5) == 0:
        return x
    rows, columns = (gaussian_matrix(n, sigma, border, truncate, x.dtype, x.device) for n in x.shape[-2:])
    return rows @ x @ columns.T


@lru_cache(maxsize=16)
def gaussian_matrix(
    n: int, sigma: float, border: str, truncate: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(n, n): what each pixel of a line takes from each."""
    radius = int(truncate * sigma + 0.5)
    offset = torch.arange(-radius, radius + 1, device=device)
    weight = (-0.5 * (offset.double() / sigma) ** 2).exp()
    weight = (weight / weight.sum()).expand(n, -1)
    source = BORDERS[border](torch.arange(n, device=device)[:, None] + offset, n)
    return weight.new_zeros(n, n).scatter_add_(1, source, weight).to(dtype)


def pad(x: Tensor, size: int, border: str = "reflect_101") -> Tensor:
    """`size` more pixels on every side, of images smaller than that too."""
    for axis in (-2, -1):
        n = x.shape[axis]
        x = x.index_select(axis, BORDERS[border](torch.arange(-size, n + size, device=x.device), n))
    return x


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Each pixel's neighbourhood weighted by one odd square kernel (k, k), borders mirrored, by Fourier transform."""
    half = kernel.shape[-1] // 2
    padded = pad(x, half)
    size = padded.shape[-2:]
    spectrum = torch.fft.rfft2(padded) * torch.fft.rfft2(kernel.to(x), s=size).conj()
    return torch.fft.irfft2(spectrum, s=size)[..., : x.shape[-2], : x.shape[-1]]


def stencil(x: Tensor, kernel: Tensor) -> Tensor:
    """`correlate` for a small kernel, as a sum of shifted images: whole numbers stay exact."""
    height, width = x.shape[-2:]
    padded = pad(x, kernel.shape[-1] // 2)
    total = torch.zeros_like(x)
    for i, row in enumerate(kernel.tolist()):
        for j, weight in enumerate(row):
            total += weight * padded[..., i : i + height, j : j + width]
    return total


@lru_cache(maxsize=16)
def disk(radius: float, sigma: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(k, k) even disk with a softened edge, 17 or more pixels wide: what a lens out of focus makes of a point."""
    half = 8 if radius <= 8 else math.ceil(radius)
    line = torch.arange(-half, half + 1, device=device)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).to(torch.float64)
    soft = torch.arange(-1, 2) if radius <= 8 else torch.arange(-2, 3)
    weight = (-0.5 * (soft.double() / sigma) ** 2).exp()
    weight = weight / weight.sum()
    return stencil(flat / flat.sum(), weight[:, None] * weight).to(dtype)


def clipped_zoom(x: Tensor, factor: float) -> Tensor:
    """The middle of the images, enlarged to their size, linearly between the centres of the corner pixels."""
    return _lerp(_lerp(x, -2, factor), -1, factor)


def sample(x: Tensor, rows: Tensor, columns: Tensor, *, border: str) -> Tensor:
    """(B, C, H, W): each image between its pixels, at (B, H, W) rows and columns; bilinear."""
    height, width = x.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None], (columns - left)[:, None]  # (B, 1, H, W)
    upper, lower = (BORDERS[border](top.long() + step, height) * width for step in (0, 1))
    before, after = (BORDERS[border](left.long() + step, width) for step in (0, 1))
    above = take(x, upper + before) * (1 - right) + take(x, upper + after) * right
    below = take(x, lower + before) * (1 - right) + take(x, lower + after) * right
    return above * (1 - down) + below * down


def take(x: Tensor, index: Tensor) -> Tensor:
    """(B, C, H, W): pixels by number, row × width + column; `index` (B, H, W), the same for all channels."""
    flat = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, flat).view(*x.shape[:2], *index.shape[1:])


def box_shrink(levels: Tensor, height: int, width: int) -> Tensor:
    """Each new pixel is the mean of the old ones whose centres lie in its box; levels are rounded after each axis."""
    for axis, new in ((-1, width), (-2, height)):
        places, inside = _boxes(levels.shape[axis], new, levels.dtype, levels.device)  # (most, new)
        if axis == -2:
            inside = inside[..., None]
        sums = levels.index_select(axis, places[0])
        for place, belongs in zip(places[1:], inside[1:], strict=True):
            sums += levels.index_select(axis, place).mul_(belongs)
        levels = sums.div_(inside.sum(0)).add_(0.5 + 1e-4).floor_()
    return levels


def _lerp(x: Tensor, axis: int, factor: float) -> Tensor:
    n = x.shape[axis]
    kept = math.ceil(n / factor)
    grown = max(round(kept * factor), n)
    trim = (grown - n) // 2
    place = torch.arange(trim, trim + n, dtype=torch.float64, device=x.device) * ((kept - 1) / max(grown - 1, 1))
    low = place.floor().clamp(max=max(kept - 2, 0))
    shape = (-1, 1) if axis == -2 else (-1,)
    share = (place - low).to(x.dtype).view(shape)
    low = low.long() + (n - kept) // 2
    high = (low + 1).clamp(max=n - 1)
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share


@lru_cache(maxsize=16)
def _boxes(old: int, new: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(most, new) the old pixels of each box, first, second, …, and whether (0 or 1) there are so many."""
    ratio = old / new
    centre = (torch.arange(new, dtype=torch.float64, device=device)[:, None] + 0.5) * ratio
    offset = (torch.arange(old, dtype=torch.float64, device=device) + 0.5 - centre) / ratio
    inside = (offset > -0.5) & (offset <= 0.5)
    first, count = inside.int().argmax(1), inside.sum(1)
    place = torch.arange(int(count.max()), device=device)[:, None]
    return (first + place).clamp(max=old - 1), (place < count).to(dtype)
