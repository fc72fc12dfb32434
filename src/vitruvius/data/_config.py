"""What a recipe says about data; option names are timm's."""

from __future__ import annotations

from typing import Literal

from vitruvius._config import key, required, section
from vitruvius._errors import ConfigError

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]


@section("data.mix")
class Mix:
    """A second data set in every training batch, read and augmented like the first."""

    dataset: str = required("npz, bin/…, tensors, folder, torch/…, hfds/…; nothing that can only be streamed")
    fraction: float = required("share of each batch: exactly round(fraction · batch_size) images are these", gt=0, lt=1)
    root: str | None = key(None, "folder that holds the data")
    train_split: str = key("train", "the split that is used")
    class_map: str | None = key(None, "as data.class_map")
    num_samples: int | None = key(None, "use at most this many of its images, a fixed random choice; null: all", ge=1)
    epoch_images: int | None = key(None, "images in an epoch, of both sets; null: as many as the first set has", ge=1)
    download: bool = key(False, "fetch the data if it is not there")


@section("data")
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
    num_classes: int | None = key(None, "number of classes; null: as found in the data", ge=1)
    classes: str | None = key(None, "only these, in this order: imagenet-100, or a file with one class name per line")
    class_map: str | None = key(
        None,
        "folder: imagenet-1k; folder, torch: caltech-101, caltech-102; also hfds, tfds: a file, one name per line",
    )
    train_num_samples: int | None = key(None, "at most so many training images, a fixed random choice; null: all", ge=1)
    val_num_samples: int | None = key(None, "at most so many validation images, a fixed random choice; null: all", ge=1)
    subset: str | None = key(None, "of the validation images: robustbench-imagenet, or a file, one file name per line")
    download: bool = key(False, "fetch the data if it is not there, where the source can")
    mix: Mix | None = key(None, "a second set in every training batch: {dataset: npz, root: …, fraction: 0.7}")

    image_size: int | None = key(None, "side of the images in pixels; null: the model's", ge=1)
    in_chans: int | None = key(None, "channels, 1 grey or 3 colour; null: the model's", ge=1)
    batch_size: int = key(128, "images per process and batch", ge=1)
    eval_batch_size: int | None = key(None, "images per process and batch in evaluation; null: batch_size", ge=1)
    workers: int = key(4, "processes that decode; at most one per core and per batch, none for data in memory", ge=0)
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
    broken: Literal["error", "skip"] = key("error", "images that cannot be decoded: an error, or left out")
    changed: Literal["error", "warn"] = key("error", "other images when a run is resumed: an error, or a warning")

    no_aug: bool = key(False, "no augmentation of training images")
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = key(
        None, "timm's: random resized crop (rrc), random crop that keeps the ratio (rkrc), or resize to it (rkrr)"
    )
    scale: tuple[float, float] | None = key(None, "share of the area cropped, from and to; null: what suits the data")
    ratio: tuple[float, float] | None = key(None, "width / height of the crop, from and to; null: what suits the data")
    rand_crop: bool = key(False, "crop at the model's size after padding, instead of resizing")
    pad: int | None = key(
        None,
        "pixels of zero padding before cropping; null: 1 for digits that are only padded and flipped, else 0",
        ge=0,
    )
    hflip: float | None = key(None, "probability of a horizontal flip; null: 0.5 for photos, 0 for digits", ge=0, le=1)
    vflip: float = key(0.0, "probability of a vertical flip", ge=0, le=1)
    color_jitter: float | tuple[float, ...] | None = key(
        None, "strength of colour jitter, one number or one for each of brightness, contrast, saturation (and hue)"
    )
    color_jitter_prob: float | None = key(None, "probability of colour jitter; null: always", ge=0, le=1)
    grayscale_prob: float = key(0.0, "probability of turning an image grey", ge=0, le=1)
    gaussian_blur_prob: float = key(0.0, "probability of a Gaussian blur", ge=0, le=1)
    rotation: float = key(0.0, "largest rotation in degrees", ge=0)
    aa: str | None = key(None, "a policy of timm: rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, 3a, original, …; null: none")
    train_interpolation: Literal["random", Interpolation] = key("random", "in training; random: bilinear or bicubic")
    interpolation: Interpolation | None = key(None, "interpolation for evaluation; null: the model's")
    crop_pct: float | None = key(None, "share of the resized side that evaluation keeps; null: the model's", gt=0, le=1)
    crop_mode: Literal["center", "squash", "border"] | None = key(None, "how evaluation crops; null: the model's")
    reprob: float = key(0.0, "probability of random erasing", ge=0, le=1)
    remode: Literal["const", "rand", "pixel"] = key("pixel", "erased regions: zeros, one colour, or random pixels")
    recount: int = key(1, "erased regions per image", ge=1)
    aug_repeats: int = key(0, "repeated augmentation: times that an image is in an epoch; 3 in DeiT, 0: off", ge=0)
    aug_splits: int = key(0, "copies of an image per batch, the first one clean, the others augmented; 0: off", ge=0)

    mixup: float = key(0.0, "alpha of mixup; 0: off", ge=0)
    cutmix: float = key(0.0, "alpha of cutmix; 0: off", ge=0)
    cutmix_minmax: tuple[float, float] | None = key(None, "least and largest share of cutmix; null: by its alpha")
    mixup_prob: float = key(1.0, "probability of mixup or cutmix", ge=0, le=1)
    mixup_switch_prob: float = key(0.5, "probability of cutmix where both are on", ge=0, le=1)
    mixup_mode: Literal["batch", "pair", "elem"] = key("batch", "one mix per batch, per pair, or per image")
    mixup_off_epoch: int = key(0, "epoch from which images are not mixed; 0: never", ge=0)
    smoothing: float = key(0.1, "label smoothing", ge=0, le=1)

    def __post_init__(self) -> None:
        for name in ("scale", "ratio", "cutmix_minmax"):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high or (name == "cutmix_minmax" and high > 1):
                raise ConfigError(f"data.{name} = [{low}, {high}], expected two numbers above 0, the smaller first.")
        if self.classes is not None and self.class_map is not None:
            raise ConfigError("data.classes and data.class_map both choose and number the classes; keep one of them.")
        if self.mix is not None and self.aug_repeats > 1:
            raise ConfigError("data.aug_repeats repeats the images of one data set; it does not go with data.mix.")
        if self.aug_splits == 1:
            raise ConfigError("data.aug_splits = 1, expected 0 or at least 2.")
        if self.aug_splits and self.no_aug:
            raise ConfigError(f"data.aug_splits = {self.aug_splits} augments images, data.no_aug forbids it.")
        if self.aug_splits and (self.mixup or self.cutmix or self.cutmix_minmax):
            raise ConfigError("data.aug_splits compares an image with itself; it does not go with mixup and cutmix.")
