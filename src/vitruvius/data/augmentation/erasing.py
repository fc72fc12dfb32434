"""Augmentation of pixels: shift, flip and erase whole batches by each image's key, or erase one image in a worker.

Random erasing: Zhong et al. 2017, arXiv:1708.04896, with timm's rule for boxes; it fills with black, or with
noise from a normal distribution (mean 1/2, deviation 1/4) truncated to [0, 1], so pixels stay pixels.
B batch, C channels, H height, W width
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.nn import functional as F

from vitruvius._random import uniform

_AREA = (0.02, 1 / 3)  # of the image, shared by the boxes
_LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_TRIES = 10
_SHIFT, HFLIP, VFLIP, _ERASE = 1, 2, 3, 4  # streams of random numbers


def shift(images: Tensor, keys: Tensor, *, pad: int) -> Tensor:
    """Zero-pad by `pad` pixels and crop back at a random place, decided by each image's key (B,)."""
    if pad == 0:
        return images
    height, width = images.shape[-2:]
    offset = (uniform(keys, _SHIFT, 2) * (2 * pad + 1)).long()  # (B, 2)
    rows = offset[:, :1] + torch.arange(height, device=images.device)  # (B, H)
    columns = offset[:, 1:] + torch.arange(width, device=images.device)  # (B, W)
    padded = F.pad(images, (pad, pad, pad, pad))
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def flip(images: Tensor, keys: Tensor, *, hflip: float, vflip: float) -> Tensor:
    """Mirror left-right and top-bottom, each with its probability."""
    for axis, stream, probability in ((-1, HFLIP, hflip), (-2, VFLIP, vflip)):
        if probability > 0:
            chosen = uniform(keys, stream, 1)[:, 0] < probability
            images = torch.where(chosen[:, None, None, None], images.flip(axis), images)
    return images


def erase(images: Tensor, keys: Tensor, *, probability: float, mode: str, count: int) -> Tensor:
    """Erase up to `count` boxes in each chosen image: `const` black, `rand` one colour, `pixel` noise."""
    if probability == 0:
        return images
    u = uniform(keys, _ERASE, 2)  # (B, 2)
    chosen = u[:, 0] < probability
    boxes = 1 + (u[:, 1] * count).long()  # (B,) how many
    for number in range(count):
        inside = _box(images, uniform(keys, _ERASE + 1 + 2 * number, 4 * _TRIES), boxes)  # (B, 1, H, W)
        inside = inside & (chosen & (number < boxes))[:, None, None, None]
        images = torch.where(inside, _fill(images, keys, mode, _ERASE + 2 + 2 * number), images)
    return images


def erased_rows(keys: Tensor, probability: float) -> Tensor:
    """Numbers of the images that `erase` changes, so that the others need no noise."""
    return (uniform(keys, _ERASE, 2)[:, 0] < probability).nonzero()[:, 0]


class Erase:
    """Random erasing of one uint8 image (C, H, W), with the global generators; a worker's last step."""

    def __init__(self, *, probability: float, mode: str, count: int) -> None:
        self.probability, self.mode, self.count = probability, mode, count

    def __call__(self, image: Tensor) -> Tensor:
        if random.random() >= self.probability:
            return image
        image, boxes = image.clone(), random.randint(1, self.count) if self.count > 1 else 1
        for _ in range(boxes):
            box = self._place(image, boxes)
            if box is not None:
                image[(..., *box)] = self._fill(image[(..., *box)])
        return image

    def _place(self, image: Tensor, boxes: int) -> tuple[slice, slice] | None:
        height, width = image.shape[-2:]
        for _ in range(_TRIES):
            area = random.uniform(*_AREA) * height * width / boxes
            aspect = math.exp(random.uniform(*_LOG_ASPECT))
            tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if tall < height and wide < width:
                top, left = random.randint(0, height - tall), random.randint(0, width - wide)
                return slice(top, top + tall), slice(left, left + wide)
        return None

    def _fill(self, box: Tensor) -> Tensor:
        if self.mode == "const":
            return torch.zeros_like(box)
        shape = box.shape if self.mode == "pixel" else (len(box), 1, 1)
        return truncated_normal(torch.rand(shape)).mul(255).round().byte().expand_as(box)


def _box(images: Tensor, numbers: Tensor, boxes: Tensor) -> Tensor:
    """(B, 1, H, W), True inside the first of ten random boxes that fits; nowhere if none does."""
    height, width = images.shape[-2:]
    u = numbers.view(len(images), _TRIES, 4)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * u[..., 0]) * height * width / boxes[:, None]
    aspect = torch.exp(_LOG_ASPECT[0] + (_LOG_ASPECT[1] - _LOG_ASPECT[0]) * u[..., 1])
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (B, tries)
    fits = (tall < height) & (wide < width)
    top, left = (u[..., 2] * (height - tall + 1)).floor(), (u[..., 3] * (width - wide + 1)).floor()
    first = fits.int().argmax(1, keepdim=True)
    tall, wide, top, left = (t.gather(1, first)[:, :, None] for t in (tall, wide, top, left))  # (B, 1, 1)
    row = torch.arange(height, device=images.device)[:, None]
    column = torch.arange(width, device=images.device)
    inside = (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)
    return (inside & fits.any(1)[:, None, None])[:, None]


def _fill(images: Tensor, keys: Tensor, mode: str, stream: int) -> Tensor:
    if mode == "const":
        return torch.zeros_like(images)
    batch, channels, height, width = images.shape
    shape = (batch, channels, height, width) if mode == "pixel" else (batch, channels, 1, 1)
    return truncated_normal(uniform(keys, stream, math.prod(shape[1:]))).view(shape)


def truncated_normal(u: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) → normal ones, mean 1/2 and deviation 1/4, truncated to [0, 1]."""
    inner = math.erf(math.sqrt(2))  # mass within two deviations
    return (0.5 + 0.25 * math.sqrt(2) * torch.erfinv(inner * (2 * u - 1))).clamp(0, 1)
