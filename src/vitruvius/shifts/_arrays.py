"""Images in `.npy` files, five severities one after the other, as CIFAR-10-C and CIFAR-100-C are published.

n images per severity, (5 n, height, width, channels) uint8 in a file of each corruption, and labels.npy (5 n).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C, SEVERITIES, corruption_names
from vitruvius.shifts._base import Shift, Subset
from vitruvius.shifts._pictures import unpacked
from vitruvius.shifts._remarks import Remark, listed

PUBLISHED_IMAGES = 10_000
CHANNELS = (1, 3)  # grey, colour


class ArrayImages:
    """One severity of one file.

    `labels` (n,) are their classes; `name` is what errors and reports call them; `num_classes` how many classes there
    are.

    `file` holds five severities one after the other, of which `severity` says which.
    """

    def __init__(self, file: Path, labels: np.ndarray, severity: int, *, name: str, num_classes: int) -> None:
        images = len(labels) // len(SEVERITIES)
        rows = slice((severity - 1) * images, severity * images)
        self.pixels = torch.from_numpy(np.array(_load(file)[rows])).movedim(-1, 1)  # (n, C, H, W) uint8
        self.labels: Tensor = torch.from_numpy(labels[rows].astype(np.int64))
        self.name, self.num_classes = name, num_classes
        self.keys = torch.arange(len(self.labels))
        self.remarks: list[Remark] = []

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The image and its label, by its `index` from 0."""
        pixels = self.pixels[index].movedim(0, -1).numpy()
        if pixels.shape[-1] == 1:
            pixels = pixels.squeeze(-1)
        return Image.fromarray(pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        """Which image this `index` is, for messages."""
        return f"image {index} of {self.name}"


def array_shift(root: Path, *, name: str, archive: Sequence[str], num_classes: int) -> Shift:
    """What a folder of `.npy` files holds; every file is looked at before any is used.

    root: the folder that the user names.
    name: of the shift, for reports.
    archive: folders that its archive unpacks to; the first that lies in `root` is read, else `root` itself.
    num_classes: that the labels must be below.
    """
    folder = unpacked(root, archive)
    labels = _read_labels(folder, name, num_classes)
    found = _find_corruptions(folder, name)
    for one in found:
        _check(folder / f"{one}.npy", len(labels))
    subsets = [_subset(folder, labels, one, s, name, num_classes) for one in found for s in SEVERITIES]
    return Shift(
        name=name,
        parts=tuple(subsets),
        num_classes=num_classes,
        benchmark=BENCHMARK,
        missing=tuple(one for one in IMAGENET_C if one not in found),
        remarks=tuple(_remarks(folder, name, found, len(labels) // len(SEVERITIES))),
    )


def _find_corruptions(folder: Path, name: str) -> list[str]:
    """The corruptions that have a file, published ones first; others count if they are registered."""
    found = [one for one in corruption_names("all") if (folder / f"{one}.npy").is_file()]
    if not found:
        raise DataError(
            f"{folder} has none of the files of {name}; expected e.g. fog.npy beside labels.npy, found "
            f"{listed(folder)}. Name the folder that holds them."
        )
    return found


def _remarks(folder: Path, name: str, found: Sequence[str], images: int) -> list[str]:
    remarks = []
    unknown = sorted({file.stem for file in folder.glob("*.npy")} - {*found, "labels"})
    if unknown:
        files = ", ".join(f"{one}.npy" for one in unknown)
        remarks.append(f"{name}: left out, not a corruption of it: {files}.")
    if images != PUBLISHED_IMAGES:
        remarks.append(f"{name}: {images} images per severity; as published there are 10,000.")
    return remarks


def _subset(folder: Path, labels: np.ndarray, one: str, severity: int, name: str, num_classes: int) -> Subset:
    def opened() -> ArrayImages:
        called = f"{name}/{one} {severity}"
        return ArrayImages(folder / f"{one}.npy", labels, severity, name=called, num_classes=num_classes)

    return Subset(name=f"{one} {severity}", group=one, severity=severity, open=opened)


def _read_labels(folder: Path, name: str, num_classes: int) -> np.ndarray:
    file = folder / "labels.npy"
    if not file.is_file():
        raise DataError(
            f"{folder} has no labels.npy; the labels of {name} lie beside its files, e.g. fog.npy; found "
            f"{listed(folder)}. Name the folder that holds them."
        )
    labels = _load(file)
    _check_labels(labels, file, num_classes)
    return np.array(labels)


def _check_labels(labels: np.ndarray, file: Path, num_classes: int) -> None:
    if labels.ndim != 1 or not len(labels) or len(labels) % len(SEVERITIES):
        raise DataError(
            f"{file} has shape {labels.shape}; expected one label per image, for {len(SEVERITIES)} severities one "
            "after the other, as published (50000,). Get it again."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"{file} holds {labels.dtype} from {labels.min()} to {labels.max()}, labels other than "
            f"0 … {num_classes - 1}. It may belong to another set; get it again."
        )


def _check(file: Path, images: int) -> None:
    pixels = _load(file)
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or len(pixels) != images or pixels.shape[-1] not in CHANNELS:
        raise DataError(
            f"{file} holds {pixels.dtype} {pixels.shape}; expected uint8 ({images}, height, width, channels) with 1 or "
            f"3 channels, an image for each of the {images} labels. Get it again, or take it away."
        )


def _load(file: Path) -> np.ndarray:
    """The array, mapped and not read."""
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        size = file.stat().st_size
        raise DataError(
            f"{file} cannot be read ({size:,} bytes: {error}); it may be truncated, or is not an array. Get it again, "
            "or take it away."
        ) from error
    return array
