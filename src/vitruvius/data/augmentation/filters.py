"""Sharpening and blurring of batches, each image with its own strength, equal to Pillow's and torchvision's.

`x` holds levels: float32 (B, C, H, W) of whole numbers 0 … 255; strengths are (B,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitruvius.data.augmentation.colour import blend
from vitruvius.data.augmentation.resampling import to_levels

_PASSES = 3  # box filters in a row make Pillow's Gaussian
_REACH = 2  # pixels to either side that a box filter may take: enough up to a radius of 2.4


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Towards a smoothed image (factor below 1) or away from it; edge pixels are not smoothed."""
    if min(x.shape[-2:]) < 3:
        return x
    sums = x[..., :-2] + x[..., 1:-1] + x[..., 2:]
    sums = sums[..., :-2, :] + sums[..., 1:-1, :] + sums[..., 2:, :]  # (B, C, H - 2, W - 2): over 3 × 3 pixels
    smooth = x.clone()
    smooth[..., 1:-1, 1:-1] = to_levels((sums + 4 * x[..., 1:-1, 1:-1]) / 13)
    return blend(smooth, x, factor)


def pillow_blur(x: Tensor, radius: Tensor) -> Tensor:
    """Pillow's GaussianBlur: three box filters across, then three down, of a fractional width, rounded after each.

    `radius` (B,) in pixels, at most 2 in timm's policies: the standard deviation.
    """
    inner, edge = _box_radius(radius.double())
    offsets = torch.arange(-_REACH, _REACH + 1, device=x.device)
    away = offsets.abs()
    weights = (away <= inner[:, None]).double() + (away == inner[:, None] + 1) * edge[:, None]  # (B, 2 reach + 1)
    weights = (weights / (2 * inner + 1 + 2 * edge)[:, None]).to(x.dtype)
    for _ in range(_PASSES):
        x = _along_width(x, weights)
    x = x.transpose(2, 3)
    for _ in range(_PASSES):
        x = _along_width(x, weights)
    return x.transpose(2, 3)


def gaussian_blur(x: Tensor, sigma: Tensor, size: int) -> Tensor:
    """torchvision's GaussianBlur: a Gaussian window of `size` pixels, at most twice the image, edges reflected."""
    reach = size // 2
    offsets = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    weights = torch.exp(-0.5 * (offsets / sigma[:, None].to(x.dtype)) ** 2)
    weights = weights / weights.sum(1, keepdim=True)  # (B, size)
    padded = F.pad(x, (reach, reach, reach, reach), mode="reflect")
    across = _convolve(padded, weights)
    both = _convolve(across.transpose(2, 3), weights).transpose(2, 3)
    return both.round_().clamp_(0, 255)


def _box_radius(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Whole and fractional part of the box whose three-fold use has this standard deviation."""
    variance = sigma.square() / _PASSES
    whole = ((12 * variance + 1).sqrt() - 1).div(2).floor()
    edge = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    return whole, edge


def _along_width(x: Tensor, weights: Tensor) -> Tensor:
    total = _convolve(F.pad(x, (_REACH, _REACH, 0, 0), mode="replicate"), weights)
    return to_levels(total - 1e-3)  # Pillow's fixed-point weights are cut, so halves are rounded down


def _convolve(padded: Tensor, weights: Tensor) -> Tensor:
    """(B, C, H, W - taps + 1): along the width, each image with its own weights (B, taps)."""
    taps = weights.shape[1]
    width = padded.shape[-1] - taps + 1
    total = weights[:, 0, None, None, None] * padded[..., :width]
    for tap in range(1, taps):
        total += weights[:, tap, None, None, None] * padded[..., tap : tap + width]
    return total
