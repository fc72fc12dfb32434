"""Images looked up between their pixels: zooming, warping, boxes.

B images (B, C, H, W).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius.corruptions._filters import BORDERS


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
    narrow = (levels @ _boxes(levels, levels.shape[-1], width).T + 0.5 + 1e-4).floor()
    return (_boxes(levels, levels.shape[-2], height) @ narrow + 0.5 + 1e-4).floor()


def stretch(x: Tensor, height: int, width: int) -> Tensor:
    """Each new pixel is the old one in which its centre lies."""
    rows = ((torch.arange(height, device=x.device) + 0.5) * (x.shape[-2] / height)).long()
    columns = ((torch.arange(width, device=x.device) + 0.5) * (x.shape[-1] / width)).long()
    return x[..., rows, :][..., columns]


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


def _boxes(like: Tensor, old: int, new: int) -> Tensor:
    """(new, old)."""
    ratio = old / new
    centre = (torch.arange(new, dtype=torch.float64, device=like.device)[:, None] + 0.5) * ratio
    offset = (torch.arange(old, dtype=torch.float64, device=like.device) + 0.5 - centre) / ratio
    inside = ((offset > -0.5) & (offset <= 0.5)).double()
    return (inside / inside.sum(1, keepdim=True)).to(like.dtype)
