"""What a recipe says about data; option names are timm's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vitruvius._config import build
from vitruvius._errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A second data set in every training batch, read and augmented like the first."""

    dataset: str  # npz, bin/…, tensors, folder, torch/…, hfds/…; nothing that can only be streamed
    fraction: float  # of every batch: exactly round(fraction · batch_size) images come from here
    root: str | None = None
    train_split: str = "train"
    class_map: str | None = None
    num_samples: int | None = None  # use at most this many of its images, a fixed random choice
    epoch_images: int | None = None  # images in an epoch, of both sets together; None: as many as the first set has
    download: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ConfigError(f"data.mix.fraction is {self.fraction}, expected a number between 0 and 1.")
        for name in ("num_samples", "epoch_images"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"data.mix.{name} is {getattr(self, name)}, expected at least 1.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set, how it is read, and how training images are augmented. All images are pixels in [0, 1].

    `None` means what suits the data: `scale`, `ratio`, `hflip`, `color_jitter` are timm's for photographs
    (0.08–1, 3/4–4/3, 0.5, 0.4) and off for `digits` and `fake`; `pad` is 1 for digits, else 0;
    `image_size`, `in_chans`, `crop_pct`, `crop_mode`, `interpolation` are the model's.
    """

    dataset: str = "digits"  # digits, fake, tensors, npz, bin/…, folder, torch/…, tfds/…, hfds/…, hfids/…, wds/…
    root: str | None = None  # folder that holds the data
    train_split: str = "train"
    val_split: str = "validation"
    num_classes: int | None = None  # None: as found in the data
    classes: str | None = None  # only these, in this order: imagenet-100, or a file with one class name per line
    class_map: str | None = None  # folder: imagenet-1k; folder, hfds, tfds: text file, one class name per line
    train_num_samples: int | None = None  # use at most this many images, a fixed random choice
    val_num_samples: int | None = None
    subset: str | None = None  # of the validation images: robustbench-imagenet, or a file with one file name per line
    download: bool = False
    mix: dict[str, Any] | None = None  # a second set in every batch, see `Mix`: {dataset: npz, root: …, fraction: 0.7}

    image_size: int | None = None  # pixels
    in_chans: int | None = None  # 1 grey, 3 colour
    batch_size: int = 128  # images per process
    eval_batch_size: int | None = None  # None: batch_size
    workers: int = 4  # processes that decode; at most one per core and one per batch, none for data in memory
    cache: Literal["none", "memory"] = "none"  # memory: decode once, keep on the device
    broken: Literal["error", "skip"] = "error"  # what to do with images that cannot be decoded

    no_aug: bool = False
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = None
    scale: tuple[float, float] | None = None  # share of the area that is cropped
    ratio: tuple[float, float] | None = None  # width / height of the crop
    rand_crop: bool = False  # crop at the model's size after padding, instead of resizing
    pad: int | None = None  # pixels of zero padding before cropping
    hflip: float | None = None
    vflip: float = 0.0
    color_jitter: float | tuple[float, ...] | None = None
    color_jitter_prob: float | None = None
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    rotation: float = 0.0  # degrees, at most
    aa: str | None = None  # rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, 3a, original …
    train_interpolation: str = "random"
    interpolation: str | None = None
    crop_pct: float | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    reprob: float = 0.0  # random erasing
    remode: Literal["const", "rand", "pixel"] = "pixel"
    recount: int = 1
    aug_repeats: int = 0  # repeated augmentation; 3 in DeiT
    aug_splits: int = 0  # every image this often in a batch: first all clean, then augmented anew each time (AugMix: 3)

    mixup: float = 0.0
    cutmix: float = 0.0
    cutmix_minmax: tuple[float, float] | None = None
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    mixup_off_epoch: int = 0  # 0: never
    smoothing: float = 0.1  # label smoothing

    def __post_init__(self) -> None:
        for name in ("batch_size", "in_chans", "recount"):
            self._check(name, 1, None)
        for name in ("eval_batch_size", "num_classes", "image_size", "train_num_samples", "val_num_samples"):
            self._check(name, 1, None)
        for name in ("workers", "pad", "aug_repeats", "mixup", "cutmix", "mixup_off_epoch", "rotation"):
            self._check(name, 0, None)
        for name in ("hflip", "vflip", "reprob", "mixup_prob", "mixup_switch_prob", "color_jitter_prob"):
            self._check(name, 0, 1)
        for name in ("grayscale_prob", "gaussian_blur_prob", "smoothing"):
            self._check(name, 0, 1)
        if self.classes is not None and self.class_map is not None:
            raise ConfigError("data.classes and data.class_map both choose and number the classes; keep one of them.")
        self._check_splits()
        if self.mixing is not None and self.aug_repeats > 1:
            raise ConfigError("data.aug_repeats repeats the images of one data set; it does not go with data.mix.")

    @property
    def mixing(self) -> Mix | None:
        """`mix`, checked and with its defaults."""
        return None if self.mix is None else build(Mix, self.mix, source="data.mix")

    def _check_splits(self) -> None:
        if self.aug_splits == 0:
            return
        self._check("aug_splits", 2, None)
        if self.no_aug:
            raise ConfigError(f"data.aug_splits = {self.aug_splits} augments images, data.no_aug forbids it.")
        if self.mixup or self.cutmix or self.cutmix_minmax:
            raise ConfigError("data.aug_splits compares an image with itself; it does not go with mixup and cutmix.")

    def _check(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is not None and (value < low or (high is not None and value > high)):
            expected = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"data.{name} is {value}, expected {expected}.")
