"""Images in `.npy` files, five severities one after the other, as CIFAR-10-C and CIFAR-100-C are published.

n images a severity, (5 n, height, width, channels) uint8 in a file of each corruption, and labels.npy (5 n).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.corruptions import ALL, BENCHMARK, SEVERITIES
from vitruvius.shifts._base import Shift, Subset
from vitruvius.shifts._pictures import unpacked
from vitruvius.shifts._remarks import Remark, listed

PUBLISHED_IMAGES = 10_000
CHANNELS = (1, 3)  # grey, colour


class ArrayImages:
    """One severity of one file."""

    def __init__(self, file: Path, labels: np.ndarray, severity: int, *, name: str, num_classes: int) -> None:
        rows = slice((severity - 1) * len(labels) // len(SEVERITIES), severity * len(labels) // len(SEVERITIES))
        self.pixels = torch.from_numpy(np.array(_load(file)[rows])).movedim(-1, 1)  # (n, C, H, W) uint8
        self.labels: Tensor = torch.from_numpy(labels[rows].astype(np.int64))
        self.name, self.num_classes = name, num_classes
        self.keys = torch.arange(len(self.labels))
        self.remarks: list[Remark] = []

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.pixels[index].movedim(0, -1).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        return f"image {index} of {self.name}"


def array_shift(root: Path, *, name: str, archive: Sequence[str], num_classes: int) -> Shift:
    """What a folder of `.npy` files holds; every file is looked at before any is used."""
    folder = unpacked(root, archive)
    if not (folder / "labels.npy").is_file():
        raise DataError(
            f"{folder} has no labels.npy; the labels of {name} lie beside its files, e.g. fog.npy; found "
            f"{listed(folder)}. Name the folder that holds them."
        )
    labels = _labels(folder / "labels.npy", num_classes)
    found = [one for one in ALL if (folder / f"{one}.npy").is_file()]
    if not found:
        raise DataError(
            f"{folder} has none of the files of {name}; expected e.g. fog.npy beside labels.npy, found "
            f"{listed(folder)}. Name the folder that holds them."
        )
    for one in found:
        _check(folder / f"{one}.npy", len(labels))
    strange = sorted({file.stem for file in folder.glob("*.npy")} - {*ALL, "labels"})
    remarks = (
        [f"{name}: left out, no corruption of it: {', '.join(f'{one}.npy' for one in strange)}."] if strange else []
    )
    if len(labels) != len(SEVERITIES) * PUBLISHED_IMAGES:
        remarks.append(f"{name}: {len(labels) // len(SEVERITIES)} images a severity; as published there are 10,000.")
    return Shift(
        name=name,
        parts=tuple(_part(folder, labels, one, s, name, num_classes) for one in found for s in SEVERITIES),
        num_classes=num_classes,
        benchmark=BENCHMARK,
        missing=tuple(one for one in ALL if one not in found),
        remarks=tuple(remarks),
    )


def _part(folder: Path, labels: np.ndarray, one: str, severity: int, name: str, num_classes: int) -> Subset:
    def opened() -> ArrayImages:
        called = f"{name}/{one} {severity}"
        return ArrayImages(folder / f"{one}.npy", labels, severity, name=called, num_classes=num_classes)

    return Subset(name=f"{one} {severity}", group=one, severity=severity, open=opened)


def _labels(file: Path, num_classes: int) -> np.ndarray:
    labels = _load(file)
    if labels.ndim != 1 or not len(labels) or len(labels) % len(SEVERITIES):
        raise DataError(
            f"{file} has shape {labels.shape}; expected one label an image, for {len(SEVERITIES)} severities one after "
            "the other, as published (50000,). Get it again."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"{file} holds {labels.dtype} from {labels.min()} to {labels.max()}, labels other than "
            f"0 … {num_classes - 1}. It may belong to another set; get it again."
        )
    return np.array(labels)


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
            f"{file} cannot be read ({size:,} bytes: {error}); it may be truncated, or is no array. Get it again, or "
            "take it away."
        ) from error
    return array
