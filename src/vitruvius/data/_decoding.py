"""One image: decoded and transformed to uint8 under its own seed, or the reason why not; and batches of those."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitruvius._errors import DataError
from vitruvius.data._noise import seeded
from vitruvius.data._preprocessing import Transform

UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class ImageSet(Protocol):
    """Images by number."""

    @property
    def name(self) -> str: ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Decoded image and label; raises one of UNREADABLE if the image is broken."""
        ...

    def describe(self, index: int) -> str:
        """Where the image is, for messages."""
        ...


class Sample(NamedTuple):
    """One image, or the reason why there is none."""

    id: int
    label: int
    image: Tensor | None
    reason: str = ""


class Collated(NamedTuple):
    """The readable images of a batch, and (index, reason) of the others."""

    images: Tensor | None  # uint8 (B, C, H, W), or (S·B, C, H, W)
    labels: Tensor
    ids: Tensor
    broken: list[tuple[int, str]]


class Decoded(Dataset[Sample]):
    """(index, key) → Sample."""

    def __init__(self, images: ImageSet, transform: Transform, mode: str) -> None:
        self.images, self.transform, self.mode = images, transform, mode

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        index, key = item
        try:
            image, label = self.images.read(index)
            image = image if image.mode == self.mode else image.convert(self.mode)  # a copy costs time
        except UNREADABLE as error:
            return Sample(index, -1, None, f"{type(error).__name__}: {error}")
        with seeded(key, restore=get_worker_info() is None):
            return Sample(index, label, self.transform(image))


def collate(samples: list[Sample]) -> Collated:
    """Stack what could be read; keep ids and labels with their images.

    Views (S, C, H, W) of B images become (S·B, C, H, W) split by split: all clean images first, labels repeated.
    """
    good = [(s.image, s.label, s.id) for s in samples if s.image is not None]
    broken = [(s.id, s.reason) for s in samples if s.image is None]
    images, labels, ids = zip(*good, strict=True) if good else ((), (), ())
    classes, numbers = torch.tensor(labels, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)
    if not good:
        return Collated(None, classes, numbers, broken)
    if images[0].dim() == 3:
        return Collated(torch.stack(images), classes, numbers, broken)
    splits = len(images[0])
    return Collated(torch.stack(images, dim=1).flatten(0, 1), classes.repeat(splits), numbers.repeat(splits), broken)


def pil_mode(channels: int) -> str:
    """How PIL calls images of so many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise DataError(f"images have 1, 3 or 4 channels, the model asks for {channels}.")
    return modes[channels]
