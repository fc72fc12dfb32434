"""The training transform of a recipe for whole batches on their device: timm's steps, image by image different.

timm makes the list of steps; each is run here on all images at once. Randomness is a function of (seed, epoch, image),
through the key of each image.   B images, S splits; levels are float32 of whole numbers 0 … 255
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from vitruvius.data.preprocessing import Preprocessing, timm_transform

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
        (crop, *_), steps, _ = (part.transforms for part in timm_transform(config, pre))
        if not isinstance(crop, RandomResizedCropAndInterpolation):
            raise _unbatchable(crop)
        self.config, self.crop, self.size = config, crop, pre.size[1:]
        self.steps = [_make_step(step, pre) for step in steps]
        if config.rotation:
            self.steps.append(partial(rotate, degrees=config.rotation))
        if config.aug_splits and not self.steps and not config.reprob:
            raise ConfigError("data.aug_splits: all splits are alike; augment them with data.aa, e.g. augmix-m5-w4-d2.")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """`images` on any device, `keys` (B,) int64 on the CPU."""
        if images.device.type == "cpu":
            keep_memory()
        if self.config.pad:
            images = F.pad(images, (self.config.pad,) * 4)
        base = (self._plain_crop if self.config.rand_crop else self._resized_crop)(images, keys)
        if not self.config.aug_splits:
            return self._finish(base, keys)
        splits = range(1, self.config.aug_splits)
        return torch.cat([base / 255, *(self._finish(base.clone(), split_keys(keys, split)) for split in splits)])

    def _finish(self, x: Tensor, keys: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, keys)
        pixels, c = x.div_(255), self.config
        rows = erased_rows(keys, c.reprob)
        if not len(rows):
            return pixels
        there, own = (part.to(pixels.device, non_blocking=True) for part in (rows, keys[rows]))
        erased = erase(pixels[there], own, probability=c.reprob, mode=c.remode, count=c.recount)
        return pixels.index_copy_(0, there, erased)

    def _mirrored(self, keys: Tensor) -> Tensor:
        """(B, 2): whether each image is mirrored top-bottom, left-right."""
        hflip = 0.5 if self.config.hflip is None else self.config.hflip
        vertical, horizontal = uniform(keys, VFLIP, 1) < self.config.vflip, uniform(keys, HFLIP, 1) < hflip
        return torch.cat([vertical, horizontal], 1)

    def _resized_crop(self, images: Tensor, keys: Tensor) -> Tensor:
        """timm's RandomResizedCropAndInterpolation: a box of random area and shape, resized."""
        pixels = (images.shape[-2], images.shape[-1])
        modes: Any = self.crop.interpolation
        filters = [resampling.FILTERS[mode.value] for mode in (modes if isinstance(modes, tuple | list) else (modes,))]
        box = boxes(keys, pixels, self.crop.scale, self.crop.ratio)
        chosen = torch.tensor(filters)[(uniform(keys, _FILTER, 1) * len(filters)).long()]  # (B, 1)
        settings = torch.cat([box, chosen, self._mirrored(keys).long()], 1).to(images.device, non_blocking=True)
        return resampling.resized_crop(
            images,
            settings[:, :4],
            settings[:, 4],
            settings[:, 5:].bool(),
            size=self.size,
            kinds=filters,
            taps=resampling.taps_of(box, self.size, pixels, filters),
        )

    def _plain_crop(self, images: Tensor, keys: Tensor) -> Tensor:
        """torchvision's RandomCrop: a piece of the model's size, of images that are padded with zeros if too small."""
        down, across = (max(0, wanted - have) for wanted, have in zip(self.size, images.shape[-2:], strict=True))
        images = F.pad(images, (across, across, down, down))
        room = [have - wanted + 1 for wanted, have in zip(self.size, images.shape[-2:], strict=True)]
        corner = (uniform(keys, _PLACE, 2) * torch.tensor(room)).long()
        settings = torch.cat([corner, self._mirrored(keys).long()], 1).to(images.device, non_blocking=True)
        top, left, upside_down, mirrored = settings.unbind(1)
        return resampling.crop(images, top, left, self.size, upside_down, mirrored).float()


def boxes(keys: Tensor, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """(B, 4) top, left, height, width: the first of ten random boxes that fits, else the middle of the image.

    size: height and width of the images; scale, ratio: share of the area and width / height, from and to.
    """
    height, width = size
    area, shape, down, right = uniform(keys, _CROP, 4 * _TRIES).double().view(-1, _TRIES, 4).unbind(2)
    area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
    low, high = (torch.tensor(bound, dtype=torch.float64).log() for bound in ratio)
    aspect = torch.exp(low + (high - low) * shape)
    wide = (area * aspect).sqrt().round()
    tall = (area / aspect).sqrt().round()  # (B, tries)
    top = (down * (height - tall + 1)).floor()
    left = (right * (width - wide + 1)).floor()
    fits = (wide <= width) & (tall <= height)
    tries = torch.stack([top, left, tall, wide], 2).long()  # (B, tries, 4)
    first = tries[torch.arange(len(keys)), fits.int().argmax(1)]
    most_tall, most_wide = height, width
    if width / height < min(ratio):
        most_tall = round(width / min(ratio))
    elif width / height > max(ratio):
        most_wide = round(height * max(ratio))
    middle = torch.tensor([(height - most_tall) // 2, (width - most_wide) // 2, most_tall, most_wide])
    return torch.where(fits.any(1, keepdim=True), first, middle)


def rotate(x: Tensor, keys: Tensor, *, degrees: float) -> Tensor:
    """torchvision's RandomRotation: up to this many degrees either way, nearest pixels, black outside."""
    angle = (2 * uniform(keys, _ROTATION, 1)[:, 0] - 1) * degrees
    matrix = resampling.rotation_matrix(angle, x.shape[-2], x.shape[-1]).float()
    return resampling.affine(x, matrix.to(x.device, non_blocking=True), x.new_zeros(x.shape[1]), resampling.NEAREST)


def jitter(x: Tensor, keys: Tensor, *, step: transforms.ColorJitter, probability: float) -> Tensor:
    """torchvision's ColorJitter: brightness, contrast, saturation and hue by random amounts, in a random order."""
    u = uniform(keys, _JITTER, 9)
    # (B, 3 or 4): which of brightness, contrast, saturation, hue comes first, second, …
    order = u[:, : 3 if step.hue is None else 4].argsort(1)
    ranges = [one or (1.0, 1.0) for one in (step.brightness, step.contrast, step.saturation)]
    low, high = torch.tensor([*ranges, step.hue or (0.0, 0.0)]).unbind(1)
    amounts = low + (high - low) * u[:, 4:8]  # (B, 4)
    amounts = torch.where(u[:, 8:] < probability, amounts, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    for now in order.unbind(1):
        factor = amounts.gather(1, now[:, None])[:, 0]
        x = _enhance(x, now, factor)
        if step.hue is not None:
            x = _on_some(x, now == 3, operations.hue, factor)
    return x


def _enhance(x: Tensor, now: Tensor, factor: Tensor) -> Tensor:
    """One of three blends for each image: with black, with its mean grey level, or with its grey version."""
    factor = torch.where(now == 3, 1.0, factor)
    settings = torch.stack([factor, (now == 1).float(), (now == 2).float()], 1).to(x.device, non_blocking=True)
    strength, contrast, saturation = (column.view(-1, 1, 1, 1) for column in settings.unbind(1))
    level = operations.grey(x)
    degenerate = contrast * operations.mean_level(level) + saturation * level
    return operations.blend(degenerate, x, strength)


def turn_grey(x: Tensor, keys: Tensor, *, probability: float) -> Tensor:
    """torchvision's RandomGrayscale."""
    chosen = (uniform(keys, _GREY, 1)[:, 0] < probability).to(x.device, non_blocking=True)
    return torch.where(chosen[:, None, None, None], operations.grey(x), x)


def blur(x: Tensor, keys: Tensor, *, step: transforms.GaussianBlur, probability: float) -> Tensor:
    """torchvision's GaussianBlur, with a probability."""
    u, (low, high) = uniform(keys, _BLUR, 2), step.sigma
    blurred = partial(operations.gaussian_blur, size=int(step.kernel_size[0]))
    return _on_some(x, u[:, 0] < probability, blurred, low + (high - low) * u[:, 1])


def _on_some(x: Tensor, chosen: Tensor, operation: Step, strength: Tensor) -> Tensor:
    """The chosen images, (B,) on the CPU, through an operation."""
    rows = chosen.nonzero()[:, 0]
    if not len(rows):
        return x
    there = rows.to(x.device, non_blocking=True)
    return x.index_copy_(0, there, operation(x[there], strength[rows].to(x.device, non_blocking=True)))


def _make_step(step: Any, pre: Preprocessing) -> Step:
    probability = 1.0
    if isinstance(step, transforms.RandomApply):
        probability = step.p
        (step,) = step.transforms
    if isinstance(step, RandAugment | AutoAugment | AugMixAugment):
        return make_policy(step, (pre.size[1], pre.size[2]))
    if isinstance(step, transforms.ColorJitter):
        return partial(jitter, step=step, probability=probability)
    if isinstance(step, transforms.RandomGrayscale):
        return partial(turn_grey, probability=step.p)
    if isinstance(step, transforms.GaussianBlur):
        reach = step.kernel_size[0] // 2
        if reach >= min(pre.size[1:]):
            raise ConfigError(f"data.gaussian_blur_prob needs images of at least {reach + 1} pixels.")
        return partial(blur, step=step, probability=probability)
    raise _unbatchable(step)


def _unbatchable(step: Any) -> ConfigError:
    return ConfigError(
        f"{type(step).__name__} cannot be done on whole batches; use data.cache=none, which augments images one by one."
    )
