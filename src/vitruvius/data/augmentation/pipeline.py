"""The training transform of a recipe for whole batches on their device: timm's steps, image by image different.

timm makes the list of steps; each is run here on all images at once. Randomness is a function of (seed, epoch, image),
through the key of each image.   B images, S splits; levels are float32 of whole numbers 0 … 255
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.data.auto_augment import AugMixAugment, AutoAugment, RandAugment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms

from vitruvius._errors import ConfigError
from vitruvius._processes import keep_memory
from vitruvius._random import split_keys, uniform
from vitruvius.data._config import DataConfig
from vitruvius.data.augmentation import operations, resampling
from vitruvius.data.augmentation.erasing import HFLIP, VFLIP, erase, erased_rows
from vitruvius.data.augmentation.policies import make_policy
from vitruvius.data.preprocessing import Preprocessing, training_steps

Step = Callable[[Tensor, Tensor], Tensor]  # (levels, keys (B,) on the CPU) → levels; may overwrite its input

_CROP, _FILTER, _PLACE, _ROTATION, _GREY, _BLUR, _JITTER = range(100, 107)  # streams of random numbers
_TRIES = 10


class BatchAugmentation:
    """uint8 images (B, C, H, W) and their keys → augmented pixels in [0, 1], (B, C, h, w) or (S·B, C, h, w).

    A step that cannot be done in batches is a ConfigError.
    """

    def __init__(self, config: DataConfig, pre: Preprocessing) -> None:
        if config.no_aug:
            raise ConfigError("data.no_aug forbids augmentation.")
        if pre.size[0] not in (1, 3):
            raise ConfigError(f"augmentation in batches needs grey or colour images, not {pre.size[0]} channels.")
        (first, *flips), steps = training_steps(config, pre)
        self.config = config
        self.front = _make_front(first, flips, config, pre)
        self.steps = [_make_step(step, pre) for step in steps]
        if config.rotation:
            self.steps.append(_Rotation(config.rotation))
        if config.aug_splits and not self.steps and not config.reprob:
            raise ConfigError("data.aug_splits: all splits are alike; augment them with data.aa, e.g. augmix-m5-w4-d2.")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """`images` on any device, `keys` (B,) int64 on the CPU."""
        if images.device.type == "cpu":
            keep_memory()
        base = self.front(images, keys)
        if not self.config.aug_splits:
            return self._finish(base, keys)
        splits = range(1, self.config.aug_splits)
        return torch.cat([base / 255, *(self._finish(base.clone(), split_keys(keys, split)) for split in splits)])

    def _finish(self, x: Tensor, keys: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, keys)
        return self._erase(x.div_(255), keys)

    def _erase(self, pixels: Tensor, keys: Tensor) -> Tensor:
        c = self.config
        rows = erased_rows(keys, c.reprob)
        if not len(rows):
            return pixels
        there = rows.to(pixels.device, non_blocking=True)
        erased = erase(
            pixels[there],
            keys[rows].to(pixels.device, non_blocking=True),
            probability=c.reprob,
            mode=c.remode,
            count=c.recount,
        )
        return pixels.index_copy_(0, there, erased)


class _Front:
    """What comes first: a crop, and mirroring."""

    def __init__(self, flips: list[Any], size: tuple[int, int], pad: int) -> None:
        self.size, self.pad = size, pad
        self.hflip = self.vflip = 0.0
        for flip in flips:
            if isinstance(flip, transforms.RandomHorizontalFlip):
                self.hflip = flip.p
            elif isinstance(flip, transforms.RandomVerticalFlip):
                self.vflip = flip.p
            else:
                raise _unbatchable(flip)

    def mirrored(self, keys: Tensor) -> Tensor:
        """(B, 2): whether each image is mirrored top-bottom, left-right."""
        vertical = uniform(keys, VFLIP, 1)[:, 0] < self.vflip
        horizontal = uniform(keys, HFLIP, 1)[:, 0] < self.hflip
        return torch.stack([vertical, horizontal], 1)

    def padded(self, images: Tensor) -> Tensor:
        return F.pad(images, (self.pad,) * 4) if self.pad else images


class _ResizedCrop(_Front):
    """timm's RandomResizedCropAndInterpolation: a box of random area and shape, resized."""

    def __init__(
        self, crop: RandomResizedCropAndInterpolation, flips: list[Any], size: tuple[int, int], pad: int
    ) -> None:
        super().__init__(flips, size, pad)
        self.scale, self.ratio = crop.scale, crop.ratio
        chosen = crop.interpolation if isinstance(crop.interpolation, tuple | list) else (crop.interpolation,)
        self.filters = [resampling.FILTERS[mode.value] for mode in chosen]

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        images = self.padded(images)
        box = self.boxes(keys, (images.shape[-2], images.shape[-1]))
        u = uniform(keys, _FILTER, 1)[:, 0]
        chosen = torch.tensor(self.filters)[(u * len(self.filters)).long()]
        plan = resampling.make_plan(box, self.size, (images.shape[-2], images.shape[-1]), self.filters)
        settings = torch.cat([box, chosen[:, None], self.mirrored(keys).long()], 1).to(images.device, non_blocking=True)
        return resampling.resized_crop(images, settings[:, :4], settings[:, 4], settings[:, 5:].bool(), plan)

    def boxes(self, keys: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, 4) top, left, height, width: the first of ten tries that fits, else the middle of the image."""
        height, width = size
        area, shape, down, right = uniform(keys, _CROP, 4 * _TRIES).double().view(-1, _TRIES, 4).unbind(2)
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * area) * height * width
        low, high = (torch.tensor(bound, dtype=torch.float64).log() for bound in self.ratio)
        aspect = torch.exp(low + (high - low) * shape)
        wide = (area * aspect).sqrt().round()
        tall = (area / aspect).sqrt().round()  # (B, tries)
        top = (down * (height - tall + 1)).floor()
        left = (right * (width - wide + 1)).floor()
        fits = (wide <= width) & (tall <= height)
        tries = torch.stack([top, left, tall, wide], 2).long()  # (B, tries, 4)
        first = tries[torch.arange(len(keys)), fits.int().argmax(1)]
        return torch.where(fits.any(1, keepdim=True), first, self._middle(height, width))

    def _middle(self, height: int, width: int) -> Tensor:
        tall, wide = height, width
        if width / height < min(self.ratio):
            tall = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            wide = round(height * max(self.ratio))
        return torch.tensor([(height - tall) // 2, (width - wide) // 2, tall, wide])


class _PlainCrop(_Front):
    """torchvision's RandomCrop: zero padding, then a piece of the model's size."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        images = self.padded(images)
        short = [max(0, wanted - have) for wanted, have in zip(self.size, images.shape[-2:], strict=True)]
        if any(short):
            images = F.pad(images, (short[1], short[1], short[0], short[0]))
        room = [have - wanted + 1 for wanted, have in zip(self.size, images.shape[-2:], strict=True)]
        corner = (uniform(keys, _PLACE, 2) * torch.tensor(room)).long()
        settings = torch.cat([corner, self.mirrored(keys).long()], 1).to(images.device, non_blocking=True)
        top, left, upside_down, mirrored = settings.unbind(1)
        return resampling.crop(images, top, left, self.size, upside_down, mirrored).float()


@dataclass(frozen=True)
class _Rotation:
    """torchvision's RandomRotation: up to this many degrees either way, nearest pixels, black outside."""

    degrees: float

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        angle = (2 * uniform(keys, _ROTATION, 1)[:, 0] - 1) * self.degrees
        matrix = resampling.rotation_matrix(angle, x.shape[-2], x.shape[-1]).float()
        return resampling.affine(x, matrix.to(x.device, non_blocking=True), x.new_zeros(x.shape[1]), resampling.NEAREST)


class _Jitter:
    """torchvision's ColorJitter: brightness, contrast, saturation and hue by random amounts, in a random order."""

    def __init__(self, jitter: transforms.ColorJitter, probability: float) -> None:
        self.probability = probability
        self.hue = jitter.hue
        blends = (jitter.brightness, jitter.contrast, jitter.saturation)
        self.ranges = [(1.0, 1.0) if one is None else one for one in blends]

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        u = uniform(keys, _JITTER, 9)
        order = u[:, :4].argsort(1)  # (B, 4): which of brightness, contrast, saturation, hue comes first, second, …
        low, high = torch.tensor([*self.ranges, self.hue or (0.0, 0.0)]).unbind(1)
        amounts = low + (high - low) * u[:, 4:8]  # (B, 4)
        neutral = torch.tensor([1.0, 1.0, 1.0, 0.0])
        amounts = torch.where(u[:, 8:] < self.probability, amounts, neutral)
        if self.hue is None:
            order = u[:, :3].argsort(1)
        for place in range(order.shape[1]):
            now = order[:, place]
            factor = amounts.gather(1, now[:, None])[:, 0]
            x = self._enhance(x, now, factor)
            if self.hue is not None:
                x = _on_some(x, now == 3, operations.hue, factor)
        return x

    def _enhance(self, x: Tensor, now: Tensor, factor: Tensor) -> Tensor:
        """One of three blends for each image: with black, with its mean grey level, or with its grey version."""
        factor = torch.where(now == 3, 1.0, factor)
        settings = torch.stack([factor, (now == 1).float(), (now == 2).float()], 1).to(x.device, non_blocking=True)
        strength, contrast, saturation = (column.view(-1, 1, 1, 1) for column in settings.unbind(1))
        level = operations.grey(x)
        degenerate = contrast * operations.mean_level(level) + saturation * level
        return operations.blend(degenerate, x, strength)


@dataclass(frozen=True)
class _Grey:
    """torchvision's RandomGrayscale."""

    probability: float

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        chosen = (uniform(keys, _GREY, 1)[:, 0] < self.probability).to(x.device, non_blocking=True)
        return torch.where(chosen[:, None, None, None], operations.grey(x), x)


class _Blur:
    """torchvision's GaussianBlur, with a probability."""

    def __init__(self, blur: transforms.GaussianBlur, probability: float) -> None:
        self.size = int(blur.kernel_size[0])
        self.low, self.high = blur.sigma
        self.probability = probability

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        u = uniform(keys, _BLUR, 2)
        sigma = self.low + (self.high - self.low) * u[:, 1]
        return _on_some(x, u[:, 0] < self.probability, lambda y, s: operations.gaussian_blur(y, s, self.size), sigma)


def _on_some(x: Tensor, chosen: Tensor, operation: Step, strength: Tensor) -> Tensor:
    """The chosen images, (B,) on the CPU, through an operation."""
    rows = chosen.nonzero()[:, 0]
    if not len(rows):
        return x
    there = rows.to(x.device, non_blocking=True)
    return x.index_copy_(0, there, operation(x[there], strength[rows].to(x.device, non_blocking=True)))


def _make_front(first: Any, flips: list[Any], config: DataConfig, pre: Preprocessing) -> Step:
    size = (pre.size[1], pre.size[2])
    if config.rand_crop:
        return _PlainCrop(flips, size, config.pad or 0)
    if isinstance(first, RandomResizedCropAndInterpolation):
        return _ResizedCrop(first, flips, size, config.pad or 0)
    raise _unbatchable(first)


def _make_step(step: Any, pre: Preprocessing) -> Step:
    probability = 1.0
    if isinstance(step, transforms.RandomApply):
        probability = step.p
        (step,) = step.transforms
    if isinstance(step, RandAugment | AutoAugment | AugMixAugment):
        return make_policy(step, (pre.size[1], pre.size[2]))
    if isinstance(step, transforms.ColorJitter):
        return _Jitter(step, probability)
    if isinstance(step, transforms.RandomGrayscale):
        return _Grey(step.p)
    if isinstance(step, transforms.GaussianBlur):
        reach = step.kernel_size[0] // 2
        if reach >= min(pre.size[1:]):
            raise ConfigError(f"data.gaussian_blur_prob needs images of at least {reach + 1} pixels.")
        return _Blur(step, probability)
    raise _unbatchable(step)


def _unbatchable(step: Any) -> ConfigError:
    return ConfigError(
        f"{type(step).__name__} cannot be done on whole batches; use data.cache=none, which augments images one by one."
    )
