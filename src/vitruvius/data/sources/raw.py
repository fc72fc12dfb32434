"""Images in one file of raw bytes, (N, H, W, C) uint8 without a header, and their labels (N) in a .npy file beside it.

So are the diffusion images for CIFAR-10 published (Sehwag et al. 2022, arXiv:2104.09425): 15,402,688 images of 3,072
bytes, 47 GB. The file is mapped into memory and never loaded: a process touches the images it reads and no others.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitruvius._errors import DataError
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, check_num_classes, data_source

Shape = tuple[int, int, int]  # height, width, channels
_SHAPE = re.compile(r"bin/([1-9]\d*)x([1-9]\d*)x([134])")


class RawImages:
    """Images by number, read where they lie; a worker process that gets a copy maps the files again."""

    def __init__(self, path: Path, labels: Path, shape: Shape, name: str, num_classes: int) -> None:
        self.name, self.num_classes = name, num_classes
        self._made_of = (path, labels, shape, name, num_classes)
        self.labels = _mapped_labels(labels)
        self.pixels = _mapped_bytes(path).reshape(len(self.labels), *shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return RawImages, self._made_of

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.array(self.pixels[index])  # a copy: what is done to the image is not done to the file
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        return f"image {index} of {self._made_of[0]}"


@data_source("bin", after_slash="<height>x<width>x<channels>", root="the file of raw images, …images.bin")
def open_raw(config: DataConfig, split: str, size: Size) -> RawImages:
    """Raw bytes in the file `root`, `…images.bin`, with labels in `…labels.npy` beside it; one split."""
    written = _SHAPE.fullmatch(config.dataset)
    if written is None:
        expected = "expected height, width and 1, 3 or 4 channels, as in bin/32x32x3."
        raise DataError(f"{config.dataset!r} does not say how large an image is; {expected}")
    height, width, channels = (int(number) for number in written.groups())
    shape = (height, width, channels)
    path, beside = _files(config.root or "")
    labels = _mapped_labels(beside)
    _check_labels(labels, beside, config.num_classes)
    _check_bytes(path, beside, len(labels), shape)
    classes = check_num_classes(config, str(beside), max(int(labels.max()) + 1, config.num_classes or 0))
    return RawImages(path, beside, shape, f"{config.dataset}/{split}", classes)


def _files(root: str) -> tuple[Path, Path]:
    """Images and labels: the last `images` in the name of the one is `labels` in the name of the other."""
    path = Path(root).expanduser()
    before, images, after = path.stem.rpartition("images")
    if path.suffix != ".bin" or not images:
        raise DataError(f"{path} must be called …images.bin, so that its labels are found beside it in …labels.npy.")
    beside = path.with_name(f"{before}labels{after}.npy")
    for file in (path, beside):
        if not file.is_file():
            raise DataError(f"there is no file {file} here; images and labels are mapped from local files.")
    return path, beside


def _mapped_bytes(path: Path) -> Any:
    """The file as an array; nothing is read ahead, since images are asked for in random order."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, np.uint8)


def _mapped_labels(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read the labels in {path}: {error}") from error


def _check_labels(labels: Any, path: Path, num_classes: int | None) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise DataError(f"{path} holds {labels.dtype} {labels.shape}, expected at least one whole number in a row (N).")
    least, most = int(labels.argmin()), int(labels.argmax())
    if labels[least] < 0:
        raise DataError(f"{path}: image {least} has the label {labels[least]}, expected 0 or more.")
    if num_classes is not None and labels[most] >= num_classes:
        expected = f"0 to {num_classes - 1}, as data.num_classes says"
        raise DataError(f"{path}: image {most} has the label {labels[most]}, expected {expected}.")


def _check_bytes(path: Path, beside: Path, number: int, shape: Shape) -> None:
    height, width, channels = shape
    have, need = path.stat().st_size, number * height * width * channels
    if have != need:
        amount = f"{have - need:,} bytes are too many" if have > need else f"{need - have:,} bytes are missing"
        raise DataError(
            f"{path} has {have:,} bytes; {number:,} images of {height}x{width}x{channels}, one for each label in "
            f"{beside.name}, have {need:,}: {amount}. Copy the file again, or correct the size in data.dataset."
        )
