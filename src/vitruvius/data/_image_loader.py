"""Images that are decoded as they are needed, by worker processes, in an order and with a luck that ignore them.

Workers hand over uint8; float pixels and erasing come on the device. Each image's augmentation is seeded by its key.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vitruvius._errors import DataError
from vitruvius.data._augment import erase
from vitruvius.data._config import DataConfig
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._noise import seeded
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import Transform, to_pixels

logger = logging.getLogger(__name__)

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


class Batches(Sampler[list[tuple[int, int]]]):
    """Lists of (index, key); the loader sets epoch and start."""

    def __init__(self, order: Order) -> None:
        self.order, self.epoch, self.start = order, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        ids, keys = (t.tolist() for t in self.order.epoch(self.epoch))
        size = self.order.batch_size
        for begin in range(self.start * size, len(ids), size):
            yield list(zip(ids[begin : begin + size], keys[begin : begin + size], strict=True))

    def __len__(self) -> int:
        return len(self.order)


class ImageLoader(BatchLoader):
    """Batches through torch's DataLoader; broken images are skipped with a list, or are an error."""

    def __init__(
        self,
        images: ImageSet,
        order: Order,
        transform: Transform,
        config: DataConfig,
        *,
        channels: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(images.name, len(order.ids), images.num_classes, device)
        self.images, self.order, self.config = images, order, config
        self._batches = Batches(order)
        workers = min(config.workers, usable_cores())
        self._loader = DataLoader(
            Decoded(images, transform, pil_mode(channels)),
            batch_sampler=self._batches,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type not in ("cpu", "mps", "meta"),
            generator=torch.Generator(),  # so that starting workers draws nothing from the global one
        )

    def __len__(self) -> int:
        return len(self.order)

    def with_ids(self) -> Iterator[BatchWithIds]:
        self._batches.epoch, self._batches.start = self.epoch, self.start_batch
        already = len(self.broken)
        for batch in self._loader:
            self._note(batch.broken)
            if batch.images is not None:
                yield self._pixels(batch), batch.labels.to(self.device), batch.ids
        if new := self.broken[already:]:
            logger.warning("skipped %d broken image(s) of %s: %s", len(new), self.name, ", ".join(new))

    def _pixels(self, batch: Collated) -> Tensor:
        assert batch.images is not None
        images = to_pixels(batch.images.to(self.device, non_blocking=True))
        c = self.config
        if self.order.shuffle and not c.no_aug:
            keys = batch.keys.to(self.device, non_blocking=True)
            images = erase(images, keys, probability=c.reprob, mode=c.remode, count=c.recount)
        return images

    def _note(self, broken: list[tuple[int, str]]) -> None:
        for index, reason in broken:
            place = self.images.describe(index)
            if self.config.broken == "error":
                raise DataError(
                    f"{place} cannot be decoded ({reason}). "
                    "Repair or remove it, or skip such images with data.broken=skip."
                )
            if place not in self.broken:
                self.broken.append(place)


def collate(samples: list[Sample]) -> Collated:
    """Stack what could be read; keep ids and labels with their images."""
    good = [sample for sample in samples if sample.image is not None]
    images = torch.stack([sample.image for sample in good if sample.image is not None]) if good else None
    labels, ids, keys = (torch.tensor(column, dtype=torch.int64) for column in _columns(good))
    return Collated(images, labels, ids, keys, [(s.id, s.reason) for s in samples if s.image is None])


def _columns(samples: list[Sample]) -> tuple[list[int], list[int], list[int]]:
    return [s.label for s in samples], [s.id for s in samples], [s.key for s in samples]


def pil_mode(channels: int) -> str:
    """How PIL calls images of so many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise DataError(f"images have 1, 3 or 4 channels, the model asks for {channels}.")
    return modes[channels]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
