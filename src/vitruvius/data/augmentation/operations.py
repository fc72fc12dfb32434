"""Colours, sharpening and blurring of batches, each image with its own strength, equal to Pillow's and torchvision's.

`x` holds levels: float32 (B, C, H, W) of whole numbers 0 … 255, C is 1 (grey) or 3 (RGB); strengths are (B,).
Every operation returns levels again, cut or rounded as Pillow does after each step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitruvius.data.augmentation.resampling import to_levels

LEVELS = 256
_PASSES = 3  # box filters in a row make Pillow's Gaussian
_REACH = 2  # pixels to either side that a box filter may take: enough up to a radius of 2.4


def grey(x: Tensor) -> Tensor:
    """(B, 1, H, W): Pillow's conversion to "L", in exact fixed-point arithmetic (all sums stay below 2²⁴)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor().unsqueeze(1)


def blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Between a degenerate image (factor 0) and the image itself (factor 1), or beyond; cut to levels."""
    moved = x - degenerate
    return moved.mul_(factor.view(-1, 1, 1, 1)).add_(degenerate).clamp_(0, 255).floor_()


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Towards black (factor below 1) or away from it."""
    return (x * factor.view(-1, 1, 1, 1)).clamp_(0, 255).floor_()


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Towards the mean grey level of each image (factor below 1) or away from it."""
    return blend(mean_level(grey(x)), x, factor)


def colour(x: Tensor, factor: Tensor) -> Tensor:
    """Towards grey (factor below 1) or away from it; grey images stay as they are."""
    return x if x.shape[1] == 1 else blend(grey(x), x, factor)


def mean_level(level: Tensor) -> Tensor:
    """(B, 1, 1, 1): the mean of `level` (B, 1, H, W), rounded to a level."""
    pixels = level[0].numel()
    exact = torch.float32 if pixels * 255 < 2**24 else torch.float64  # sums of whole numbers are exact below 2²⁴
    return (level.sum((1, 2, 3), keepdim=True, dtype=exact).double() / pixels + 0.5).floor().to(level.dtype)


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """Levels at or above the threshold are inverted; threshold 0 inverts all."""
    above = (x - (threshold - 1).view(-1, 1, 1, 1)).clamp_(0, 1)  # 0 or 1, since levels are whole numbers
    return x + above.mul_(255 - 2 * x)


def solarise_add(x: Tensor, amount: Tensor) -> Tensor:
    """Add `amount` to the levels below 128."""
    below = (128 - x).clamp_(0, 1)  # 0 or 1, since levels are whole numbers
    return (x + below.mul_(amount.view(-1, 1, 1, 1))).clamp_(max=255)


def posterise(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` (0 … 8) of each level; keeping none leaves black."""
    step = torch.exp2(8 - bits).view(-1, 1, 1, 1)
    return (x / step).floor() * step


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel so that its darkest level becomes 0 and its brightest 255."""
    low = x.amin((2, 3), keepdim=True).double()  # (B, C, 1, 1)
    high = x.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(low, 255) / (high - low)  # a true division: 255 / x is a product with the reciprocal
    level = torch.arange(LEVELS, device=x.device, dtype=torch.float64)
    stretched = (level * scale - low * scale).trunc().clamp(0, 255)  # (B, C, 1, 256), as Pillow rounds
    return _look_up(x, torch.where(high > low, stretched, level))


def equalise(x: Tensor, _: Tensor) -> Tensor:
    """Spread the levels of each channel so that all are about equally frequent."""
    index = x.long().flatten(2)  # (B, C, H·W)
    counts = torch.zeros(*x.shape[:2], LEVELS, device=x.device, dtype=torch.int64)
    counts.scatter_add_(2, index, torch.ones_like(index))
    total = x.shape[-2] * x.shape[-1]
    last = counts.gather(2, x.amax((2, 3)).long().unsqueeze(2))  # (B, C, 1): how often the brightest level occurs
    step = (total - last) // 255
    before = counts.cumsum(2) - counts  # pixels darker than each level
    spread = (step // 2 + before) // step.clamp(min=1)
    level = torch.arange(LEVELS, device=x.device)
    table = torch.where(step > 0, spread.clamp(max=255), level).to(x.dtype)
    return table.gather(2, index).view_as(x)


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by `turn` (-0.5 … 0.5 of the circle), through Pillow's 8-bit HSV."""
    if x.shape[1] == 1:
        return x
    angle, saturation, value = _to_hsv(x)
    amount = (turn * 255).trunc().view(-1, 1, 1)
    return _to_rgb((angle + amount).remainder(LEVELS), saturation, value)


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


def _look_up(x: Tensor, table: Tensor) -> Tensor:
    """Each level of x replaced by its entry in the table (B, C, 1, 256) of its image and channel."""
    return table.to(x.dtype).squeeze(2).gather(2, x.long().flatten(2)).view_as(x)


def _to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue, saturation and value, each (B, H, W) levels."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    span = value - x.amin(1)
    safe = span.clamp(min=1)
    away_red, away_green, away_blue = (value - red) / safe, (value - green) / safe, (value - blue) / safe
    sixth = torch.where(green == value, 2 + away_red - away_blue, 4 + away_green - away_red)
    sixth = torch.where(red == value, away_blue - away_green, sixth)
    angle = ((sixth / 6 + 1).remainder(1) * 255).trunc()
    saturation = (span / value.clamp(min=1) * 255).trunc()
    plain = span == 0
    return angle.masked_fill(plain, 0), saturation.masked_fill(plain, 0), value


def _to_rgb(angle: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    sector = (angle * 6 / 255).floor()
    rest = angle * 6 / 255 - sector
    share = saturation / 255
    low = (value * (1 - share)).round()
    falling = (value * (1 - share * rest)).round()
    rising = (value * (1 - share * (1 - rest))).round()
    parts = torch.stack([low, falling, rising, value])  # (4, B, H, W)
    LOW, FALLING, RISING, VALUE = range(4)
    order = [  # which part is red, green, blue in each sixth of the circle
        (VALUE, RISING, LOW),
        (FALLING, VALUE, LOW),
        (LOW, VALUE, RISING),
        (LOW, FALLING, VALUE),
        (RISING, LOW, VALUE),
        (VALUE, LOW, FALLING),
    ]
    table = torch.tensor(order).to(angle.device, non_blocking=True)  # (6, 3)
    choice = table[sector.long() % 6].movedim(-1, 0)  # (3, B, H, W)
    return parts.gather(0, choice).movedim(0, 1)


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
