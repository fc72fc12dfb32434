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
from vitruvius.data._augment import erase
from vitruvius.data._config import DataConfig
from vitruvius.data._noise import seeded
from vitruvius.data._preprocessing import Transform, to_pixels

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
    key: int
    label: int
    image: Tensor | None
    reason: str = ""


class Collated(NamedTuple):
    """The readable images of a batch, and (index, reason) of the others."""

    images: Tensor | None  # uint8 (B, C, H, W)
    labels: Tensor
    ids: Tensor
    keys: Tensor
    broken: list[tuple[int, str]]


class Decoded(Dataset[Sample]):
    """(index, key) → Sample."""

    def __init__(self, images: ImageSet, transform: Transform, mode: str) -> None:
        self.images, self.transform, self.mode = images, transform, mode

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        index, key = item
        try:
            image, label = self.images.read(index)
            image = image.convert(self.mode)
        except UNREADABLE as error:
            return Sample(index, key, -1, None, f"{type(error).__name__}: {error}")
        with seeded(key, restore=get_worker_info() is None):
            return Sample(index, key, label, self.transform(image))


def collate(samples: list[Sample]) -> Collated:
    """Stack what could be read; keep ids and labels with their images."""
    good = [sample for sample in samples if sample.image is not None]
    images = torch.stack([sample.image for sample in good if sample.image is not None]) if good else None
    labels, ids, keys = (torch.tensor(column, dtype=torch.int64) for column in _columns(good))
    return Collated(images, labels, ids, keys, [(s.id, s.reason) for s in samples if s.image is None])


def _columns(samples: list[Sample]) -> tuple[list[int], list[int], list[int]]:
    return [s.label for s in samples], [s.id for s in samples], [s.key for s in samples]


def pixels_of(batch: Collated, config: DataConfig, device: torch.device, training: bool) -> Tensor:
    """float32 (B, C, H, W) on the device; in training with random erasing."""
    assert batch.images is not None
    images = to_pixels(batch.images.to(device, non_blocking=True))
    if training and not config.no_aug:
        keys = batch.keys.to(device, non_blocking=True)
        images = erase(images, keys, probability=config.reprob, mode=config.remode, count=config.recount)
    return images


def pil_mode(channels: int) -> str:
    """How PIL calls images of so many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise DataError(f"images have 1, 3 or 4 channels, the model asks for {channels}.")
    return modes[channels]
