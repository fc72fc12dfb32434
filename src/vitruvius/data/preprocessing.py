"""How an image becomes the model's input: sizes from the model, transforms from timm, pixels not normalised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from vitruvius._errors import ConfigError
from vitruvius.data._config import DataConfig
from vitruvius.data.augmentation.erasing import Erase
from vitruvius.data.base import InputSize

Transform = Callable[[Image.Image], Tensor]  # → uint8 (C, H, W), or (S, C, H, W) with aug_splits

_DEFAULTS: dict[str, Any] = {  # timm's, for what a model does not say
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": (0.485, 0.456, 0.406),
}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What the model asks for, overruled by the recipe."""

    size: tuple[int, int, int]  # channels, height, width
    interpolation: str
    crop_pct: float
    crop_mode: str
    mean: tuple[float, ...]  # colour that fills the corners of rotated images, never subtracted


def resolve(config: DataConfig, input_size: InputSize) -> Preprocessing:
    """What the model asks for, by timm's data config or (channels, height, width) alone, overruled by `config`."""
    asked = input_size if isinstance(input_size, Mapping) else {"input_size": tuple(input_size)}
    model = {**_DEFAULTS, **{key: value for key, value in asked.items() if value}}
    channels, height, width = model["input_size"]
    if config.image_size is not None:
        height = width = config.image_size
    return Preprocessing(
        size=(config.in_chans or channels, height, width),
        interpolation=config.interpolation or model["interpolation"],
        crop_pct=config.crop_pct or model["crop_pct"],
        crop_mode=config.crop_mode or model["crop_mode"],
        mean=tuple(model["mean"]),
    )


def eval_transform(pre: Preprocessing) -> Transform:
    """Resize and crop, as the model was evaluated by its authors."""
    from timm.data import create_transform

    settings = {name: getattr(pre, name) for name in ("crop_pct", "crop_mode", "interpolation", "mean")}
    return create_transform(pre.size, normalize=False, **settings)


def train_transform(config: DataConfig, pre: Preprocessing) -> Transform:
    """timm's training transform up to uint8, with our padding, rotation and erasing; mixing follows on batches."""
    from torchvision import transforms

    made = timm_transform(config, pre)
    if config.no_aug:
        return made
    (first, *flips), colours, last = (part.transforms for part in made)
    for step in colours:
        _repair_posterize(step)
    pad = config.pad or 0
    front = [transforms.Pad(pad), first] if pad else [first]
    if config.rand_crop:
        front = [transforms.RandomCrop(pre.size[1:], padding=pad or None, pad_if_needed=True)]
    turn = [transforms.RandomRotation(config.rotation)] if config.rotation else []
    erase = [Erase(probability=config.reprob, mode=config.remode, count=config.recount)] if config.reprob else []
    shared, augmented = [*front, *flips], [*colours, *turn, *last, *erase]
    compose = transforms.Compose
    if not config.aug_splits:
        return compose([*shared, *augmented])
    if len(augmented) == len(last):
        raise ConfigError("data.aug_splits: all splits are alike; augment them with data.aa, e.g. augmix-m5-w4-d2.")
    return Splits(compose(shared), compose(last), compose(augmented), count=config.aug_splits)


def timm_transform(config: DataConfig, pre: Preprocessing) -> Any:
    """timm's steps for one image, without padding, rotation and erasing.

    One transform, or three (crop and flips, colours, last) unless the recipe asks for no augmentation.
    """
    from timm.data import create_transform

    shared = ("no_aug", "train_crop_mode", "scale", "ratio", "vflip", "color_jitter_prob", "grayscale_prob")
    settings = {name: getattr(config, name) for name in (*shared, "gaussian_blur_prob")}
    try:
        return create_transform(
            pre.size,
            is_training=True,
            hflip=0.5 if config.hflip is None else config.hflip,
            color_jitter=(0.4 if config.color_jitter is None else config.color_jitter) or None,
            auto_augment=config.aa,
            interpolation=config.train_interpolation,
            mean=pre.mean,
            normalize=False,
            separate=not config.no_aug,
            **settings,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(f"timm cannot make the training transform: {error!r}; see data.aa, data.scale, …") from error


class Splits:
    """AugMix's views of one image, (S, C, H, W): cropped and flipped once, clean first, then augmented S - 1 times.

    Hendrycks et al. 2020, arXiv:1912.02781.
    """

    def __init__(
        self, shared: Callable[[Image.Image], Image.Image], clean: Transform, augmented: Transform, *, count: int
    ) -> None:
        self.shared, self.clean, self.augmented, self.count = shared, clean, augmented, count

    def __call__(self, image: Image.Image) -> Tensor:
        base = self.shared(image)
        return torch.stack([self.clean(base), *(self.augmented(base) for _ in range(self.count - 1))])


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest bits of each channel; keeping none leaves black."""
    if bits <= 0:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, bits)


def _repair_posterize(step: Any) -> None:
    """timm 1.0's policies may keep 0 bits, which Pillow 13 refuses and Pillow 12 took for black."""
    chains = getattr(step, "policy", None) or [getattr(step, "ops", ())]  # AutoAugment, or RandAugment and AugMix
    for operation in itertools.chain.from_iterable(chains):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterize


def needs_pil(config: DataConfig) -> bool:
    """Whether the recipe asks for augmentations that timm makes on PIL images, one by one."""
    asked = (config.scale, config.ratio, config.aa, config.train_crop_mode)
    amounts = (config.color_jitter, config.rotation, config.grayscale_prob, config.gaussian_blur_prob)
    return any(value is not None for value in asked) or any(amounts) or config.rand_crop or config.aug_splits > 0


def only_what_is_asked(config: DataConfig) -> DataConfig:
    """Without timm's defaults: what suits photographs does not suit digits."""
    return replace(
        config,
        scale=config.scale or (1.0, 1.0),
        ratio=config.ratio or (1.0, 1.0),
        hflip=config.hflip or 0.0,
        color_jitter=config.color_jitter or 0.0,
    )


def resize_pixels(images: Tensor, pre: Preprocessing) -> Tensor:
    """Batches in memory to the model's size and channels; overshoot of bicubic curves is cut off."""
    channels, height, width = pre.size
    if images.shape[-2:] != (height, width):
        mode = pre.interpolation
        if mode not in ("nearest", "bilinear", "bicubic"):
            raise ConfigError(f"data in memory cannot be resized by {mode!r}; use nearest, bilinear or bicubic.")
        images = F.interpolate(images, size=(height, width), mode=mode, antialias=mode != "nearest").clamp(0, 1)
    return images if images.shape[1] == channels else images.expand(-1, channels, -1, -1)
