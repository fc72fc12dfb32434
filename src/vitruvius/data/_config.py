"""What a recipe says about data; option names are timm's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vitruvius._checks import check_finite
from vitruvius._config import build
from vitruvius._errors import ConfigError
from vitruvius._keys import key


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A second data set in every training batch, read and augmented like the first."""

    dataset: str = field(
        metadata={"help": "npz, bin/…, tensors, folder, torch/…, hfds/…; nothing that can only be streamed"}
    )
    fraction: float = field(
        metadata={"help": "share of every batch: exactly round(fraction · batch_size) images come from here"}
    )
    root: str | None = key(None, "folder that holds the data")
    train_split: str = key("train", "the split that is used")
    class_map: str | None = key(None, "as data.class_map")
    num_samples: int | None = key(None, "use at most this many of its images, a fixed random choice; null: all")
    epoch_images: int | None = key(
        None, "images in an epoch, of both sets together; null: as many as the first set has"
    )
    download: bool = key(False, "fetch the data if it is not there")

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ConfigError(f"data.mix.fraction is {self.fraction}, expected a number between 0 and 1.")
        for name in ("num_samples", "epoch_images"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"data.mix.{name} is {getattr(self, name)}, expected at least 1.")


BOUNDS: dict[str, tuple[int, int | None]] = {  # smallest and largest value of a key
    **dict.fromkeys(("batch_size", "in_chans", "recount", "eval_batch_size", "num_classes", "image_size"), (1, None)),
    **dict.fromkeys(("train_num_samples", "val_num_samples"), (1, None)),
    **dict.fromkeys(("workers", "pad", "aug_repeats", "mixup", "cutmix", "mixup_off_epoch", "rotation"), (0, None)),
    **dict.fromkeys(("hflip", "vflip", "reprob", "mixup_prob", "mixup_switch_prob", "color_jitter_prob"), (0, 1)),
    **dict.fromkeys(("grayscale_prob", "gaussian_blur_prob", "smoothing"), (0, 1)),
}


INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # timm's names


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set, how it is read, and how training images are augmented. All images are pixels in [0, 1].

    `None` means what suits the data: `scale`, `ratio`, `hflip`, `color_jitter` are timm's for photographs
    (0.08–1, 3/4–4/3, 0.5, 0.4) and off for `digits` and `fake`; `pad` is 1 for digits, else 0;
    `image_size`, `in_chans`, `crop_pct`, `crop_mode`, `interpolation` are the model's.
    """

    dataset: str = key(
        "digits",
        "digits, fake, tensors, npz, bin/…, folder, torch/…, tfds/…, hfds/…, hfids/…, wds/…; see `vitruvius list data`",
    )
    root: str | None = key(None, "folder that holds the data")
    train_split: str = key("train", "name of the training split")
    val_split: str = key("validation", "name of the split for validation")
    num_classes: int | None = key(None, "number of classes; null: as found in the data")
    classes: str | None = key(None, "only these, in this order: imagenet-100, or a file with one class name per line")
    class_map: str | None = key(
        None,
        "folder: imagenet-1k; folder, torch: caltech-101, caltech-102; also hfds, tfds: a file, one name per line",
    )
    train_num_samples: int | None = key(None, "use at most this many training images, a fixed random choice; null: all")
    val_num_samples: int | None = key(None, "use at most this many validation images, a fixed random choice; null: all")
    subset: str | None = key(
        None, "of the validation images: robustbench-imagenet, or a file with one file name per line"
    )
    download: bool = key(False, "fetch the data if it is not there, where the source can")
    mix: dict[str, Any] | None = key(
        None, "a second set in every training batch: {dataset: npz, root: …, fraction: 0.7}"
    )

    image_size: int | None = key(None, "side of the images in pixels; null: the model's")
    in_chans: int | None = key(None, "channels, 1 grey or 3 colour; null: the model's")
    batch_size: int = key(128, "images per process and batch")
    eval_batch_size: int | None = key(None, "images per process and batch in evaluation; null: batch_size")
    workers: int = key(4, "processes that decode; at most one per core and per batch, none for data in memory")
    cache: Literal["none", "memory", "auto"] = key(
        "none",
        "none: decode and augment images one by one, in workers; memory: decode once, keep on the device and augment "
        "whole batches by what is asked for; auto: as none, but on the device if all images have one size and fit",
    )
    decoder: Literal["pillow", "nvjpeg", "auto"] = key(
        "pillow",
        "who decodes JPEGs that are kept in memory as they are: pillow, in workers; nvjpeg, the GPU, whose pixels "
        "differ by rounding; auto: the GPU where it can",
    )
    broken: Literal["error", "skip"] = key(
        "error", "what images that cannot be decoded do: raise an error, or be left out"
    )
    changed: Literal["error", "warn"] = key(
        "error", "images that are not those a run began with: an error when it is resumed, or a warning"
    )

    no_aug: bool = key(False, "no augmentation of training images")
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = key(
        None, "timm's: random resized crop (rrc), random crop that keeps the ratio (rkrc), or resize to it (rkrr)"
    )
    scale: tuple[float, float] | None = key(
        None, "share of the area that a random resized crop takes, from and to; null: what suits the data"
    )
    ratio: tuple[float, float] | None = key(None, "width / height of the crop, from and to; null: what suits the data")
    rand_crop: bool = key(False, "crop at the model's size after padding, instead of resizing")
    pad: int | None = key(
        None, "pixels of zero padding before cropping; null: 1 for digits that are only padded and flipped, else 0"
    )
    hflip: float | None = key(None, "probability of a horizontal flip; null: 0.5 for photographs, 0 for digits")
    vflip: float = key(0.0, "probability of a vertical flip")
    color_jitter: float | tuple[float, ...] | None = key(
        None, "strength of colour jitter, one number or one for each of brightness, contrast, saturation (and hue)"
    )
    color_jitter_prob: float | None = key(None, "probability of colour jitter; null: always")
    grayscale_prob: float = key(0.0, "probability of turning an image grey")
    gaussian_blur_prob: float = key(0.0, "probability of a Gaussian blur")
    rotation: float = key(0.0, "largest rotation in degrees")
    aa: str | None = key(
        None,
        "automatic augmentation in timm's notation: rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, 3a, original, …; null: none",
    )
    train_interpolation: str = key("random", "interpolation for training images; random: bilinear or bicubic")
    interpolation: str | None = key(None, "interpolation for evaluation; null: the model's")
    crop_pct: float | None = key(None, "share of the resized side that the evaluation crop keeps; null: the model's")
    crop_mode: Literal["center", "squash", "border"] | None = key(None, "how evaluation crops; null: the model's")
    reprob: float = key(0.0, "probability of random erasing")
    remode: Literal["const", "rand", "pixel"] = key(
        "pixel", "what fills an erased region: zeros, one random colour, or random pixels"
    )
    recount: int = key(1, "erased regions per image")
    aug_repeats: int = key(
        0, "repeated augmentation: times that each image is in an epoch's batches; 3 in DeiT, 0: off"
    )
    aug_splits: int = key(0, "each image so often in a batch, first all clean, then augmented anew (AugMix: 3); 0: off")

    mixup: float = key(0.0, "alpha of mixup; 0: off")
    cutmix: float = key(0.0, "alpha of cutmix; 0: off")
    cutmix_minmax: tuple[float, float] | None = key(
        None, "smallest and largest share of cutmix, instead of its alpha; null: by alpha"
    )
    mixup_prob: float = key(1.0, "probability of mixup or cutmix")
    mixup_switch_prob: float = key(0.5, "probability of cutmix where both are on")
    mixup_mode: Literal["batch", "pair", "elem"] = key("batch", "one mix per batch, per pair, or per image")
    mixup_off_epoch: int = key(0, "epoch from which images are not mixed; 0: never")
    smoothing: float = key(0.1, "label smoothing")

    def __post_init__(self) -> None:
        check_finite(self, "data")
        for name, (low, high) in BOUNDS.items():
            self._check(name, low, high)
        self._check_crop()
        self._check_interpolation("interpolation", INTERPOLATIONS)
        self._check_interpolation("train_interpolation", ("random", *INTERPOLATIONS))
        if self.classes is not None and self.class_map is not None:
            raise ConfigError("data.classes and data.class_map both choose and number the classes; keep one of them.")
        self._check_splits()
        if self.mixing is not None and self.aug_repeats > 1:
            raise ConfigError("data.aug_repeats repeats the images of one data set; it does not go with data.mix.")

    @property
    def mixing(self) -> Mix | None:
        """`mix`, checked and with its defaults."""
        return None if self.mix is None else build(Mix, self.mix, source="data.mix")

    def _check_crop(self) -> None:
        if self.crop_pct is not None and self.crop_pct <= 0:
            raise ConfigError(f"data.crop_pct is {self.crop_pct}, expected a share above 0.")

    def _check_interpolation(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and value not in known:
            raise ConfigError(f"data.{name} is {value!r}, expected one of {', '.join(known)}.")

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
