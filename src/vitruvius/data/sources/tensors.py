"""Images in one file, lossless and in order: tensors in a safetensors file, or arrays in a numpy archive.

A safetensors file holds `images` (N, C, H, W) uint8, or floats in [0, 1], and `labels` (N) whole numbers; its metadata
may say `num_classes`, else it is the largest label and one. `vitruvius attack` writes such files. Synthetic sets are
published as archives, `image` (N, H, W, C) uint8 and `label` (N): Gowal et al. 2021, arXiv:2110.09468; Wang et al.
2023, arXiv:2302.04638. `class_names` beside them are used where there are some. Pickled objects are never read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitruvius._checks import check_labels, check_pixels
from vitruvius._errors import CheckpointError, DataError
from vitruvius._files import load_tensors
from vitruvius.data._config import DataConfig
from vitruvius.data.base import TRAIN_NAMES, VALIDATION_NAMES, Size, TensorSet, check_num_classes, data_source

_CHANNELS = (1, 3, 4)


@data_source("tensors", root="the safetensors file that holds images and labels")
def open_safetensors(config: DataConfig, split: str, size: Size) -> TensorSet:
    """A safetensors file `root` with images and labels; it has one split, whatever it is called.

    `data.num_classes` may say how many classes there are, if the file does not.
    """
    file = config.root or ""
    try:
        tensors, metadata = load_tensors(file)
    except CheckpointError as error:
        raise DataError(f"cannot read the images in {file}: {error}") from error
    if not {"images", "labels"} <= set(tensors):
        raise DataError(f"{file} holds {', '.join(tensors) or 'nothing'}; expected the tensors images and labels.")
    images, labels = tensors["images"], tensors["labels"]
    if images.dim() != 4 or len(images) != len(labels) or not len(labels):
        shapes = f"images {tuple(images.shape)} and labels {tuple(labels.shape)}"
        raise DataError(f"{file}: {shapes}, expected (N, C, H, W) and (N).")
    check_labels(labels, where=f"{file}: the")
    if images.is_floating_point():
        check_pixels(images)
    classes = check_num_classes(config, file, int(metadata.get("num_classes", int(labels.max()) + 1)))
    return TensorSet(name=f"tensors/{split}", images=images, labels=labels.long(), num_classes=classes)


@data_source("npz", root="the .npz file that holds images and labels")
def open_npz(config: DataConfig, split: str, size: Size) -> TensorSet:
    """A numpy archive `root`; its arrays are image and label, images and labels, or x_<split> and y_<split>."""
    path = Path(config.root or "").expanduser()
    try:
        with np.load(path, allow_pickle=False) as arrays:
            pictures, numbers = _pair(arrays, split, path)
            names = tuple(map(str, arrays["class_names"])) if "class_names" in arrays else ()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read the images in {path}: {error}") from error
    images = _images(pictures, path)
    if numbers.dtype.kind not in "iu":
        raise DataError(f"{path}: the labels have dtype {numbers.dtype}, expected whole numbers (int64).")
    labels = torch.from_numpy(numbers.astype(np.int64)).flatten()
    if len(images) != len(labels) or not len(labels):
        raise DataError(f"{path} holds {len(images)} images and {len(labels)} labels.")
    known = max(int(labels.max()) + 1, len(names), config.num_classes or 0)
    classes = check_num_classes(config, str(path), known)
    return TensorSet(name=f"npz/{split}", images=images, labels=labels, num_classes=classes, class_names=names)


def _pair(arrays: Any, split: str, path: Path) -> tuple[Any, Any]:
    """Images and labels of a split; a file with one pair has one split, whatever it is called."""
    synonyms = next((names for names in (TRAIN_NAMES, (*VALIDATION_NAMES, "test")) if split in names), ())
    pairs = [("image", "label"), ("images", "labels"), *((f"x_{name}", f"y_{name}") for name in (split, *synonyms))]
    for images, labels in pairs:
        if images in arrays and labels in arrays:
            return arrays[images], arrays[labels]
    held = ", ".join(arrays.files) or "nothing"
    raise DataError(f"{path} holds {held}; expected the arrays image and label, or x_{split} and y_{split}.")


def _images(pictures: Any, path: Path) -> Tensor:
    """(N, C, H, W), without a copy: bytes, or floats in [0, 1]."""
    if pictures.ndim == 3:
        pictures = pictures[..., None]
    if pictures.ndim != 4 or not {pictures.shape[1], pictures.shape[3]} & set(_CHANNELS):
        raise DataError(f"{path}: images {pictures.shape}, expected (N, H, W, C) or (N, C, H, W), C = 1, 3 or 4.")
    images = torch.from_numpy(pictures)
    if images.shape[-1] in _CHANNELS:
        images = images.movedim(-1, 1)
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not (images.min() >= 0 and images.max() <= 1):  # NaN is neither
        raise DataError(f"{path}: images are {images.dtype}, expected uint8, or floats from 0 to 1.")
    return images.float()
