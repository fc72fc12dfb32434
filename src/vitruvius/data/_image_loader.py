"""Images that are decoded as they are needed, by worker processes; neither order nor randomness depends on them.

One image is decoded and transformed to uint8 under its own seed, or the reason why not is kept. Workers hand over
uint8, which becomes float on the device. B batch, S splits
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vitruvius._checks import check_labels
from vitruvius._errors import DataError
from vitruvius._processes import usable_cores
from vitruvius.data._config import DataConfig
from vitruvius.data._image_seeds import seeded
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._order import AnyOrder
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
        """Decoded image and label; raises one of UNREADABLE if the image is broken. `index` counts from 0."""
        ...

    def describe(self, index: int) -> str:
        """Where the image is, for messages. `index` counts from 0."""
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
            if image.mode != self.mode:  # a copy costs time
                image = image.convert(self.mode)
        except UNREADABLE as error:
            return Sample(index, -1, None, f"{type(error).__name__}: {error}")
        with seeded(key, restore=get_worker_info() is None):
            return Sample(index, label, self.transform(image))


def collate(samples: list[Sample]) -> Collated:
    """Stack what could be read; keep ids and labels with their images.

    Views (S, C, H, W) of B images become (S·B, C, H, W) split by split: all clean images first, labels repeated.
    """
    images: list[Tensor] = []
    labels: list[int] = []
    ids: list[int] = []
    broken: list[tuple[int, str]] = []
    for sample in samples:
        if sample.image is None:
            broken.append((sample.id, sample.reason))
            continue
        images.append(sample.image)
        labels.append(sample.label)
        ids.append(sample.id)
    return _stacked(images, torch.tensor(labels, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64), broken)


def _stacked(images: list[Tensor], labels: Tensor, ids: Tensor, broken: list[tuple[int, str]]) -> Collated:
    if not images:
        return Collated(None, labels, ids, broken)
    if images[0].dim() == 3:
        return Collated(torch.stack(images), labels, ids, broken)
    splits = len(images[0])
    return Collated(torch.stack(images, dim=1).flatten(0, 1), labels.repeat(splits), ids.repeat(splits), broken)


def pil_mode(channels: int) -> str:
    """PIL's name for images with this many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise DataError(f"images have 1, 3 or 4 channels, the model asks for {channels}.")
    return modes[channels]


class Batches(Sampler[list[tuple[int, int]]]):
    """Lists of (index, key); the loader sets epoch and start."""

    def __init__(self, order: AnyOrder) -> None:
        self.order, self.epoch, self.start = order, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        ids, keys = self.order.epoch(self.epoch)
        items = list(zip(ids.tolist(), keys.tolist(), strict=True))
        size = self.order.batch_size
        for begin in range(self.start * size, len(items), size):
            yield items[begin : begin + size]

    def __len__(self) -> int:
        return len(self.order)


class ImageLoader(BatchLoader):
    """Batches through torch's DataLoader; broken images are skipped with a list, or are an error."""

    def __init__(
        self,
        images: ImageSet,
        order: AnyOrder,
        transform: Transform,
        config: DataConfig,
        *,
        channels: int,
        device: torch.device | str,
        raw: bool = False,
    ) -> None:
        """`raw` hands out the uint8 images of the workers."""
        super().__init__(images.name, len(order.ids), images.num_classes, device)
        self.images, self.order, self.config, self.raw = images, order, config, raw
        self._batches = Batches(order)
        workers = useful_workers(config.workers, len(order))
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
        return (batch for batch in self.every_batch() if len(batch[0]))

    def every_batch(self) -> Iterator[BatchWithIds]:
        self._batches.epoch, self._batches.start = self.epoch, self.start_batch
        already = len(self.broken)
        for batch in self._loader:
            self._note(batch.broken)
            check_labels(batch.labels, where=f"{self.name}: the")
            yield self._on_device(batch.images), batch.labels.to(self.device), batch.ids
        if new := self.broken[already:]:
            logger.warning("skipped %d broken image(s) of %s: %s", len(new), self.name, ", ".join(new))

    def _on_device(self, images: Tensor | None) -> Tensor:
        if images is None:
            return torch.empty(0)
        images = images.to(self.device, non_blocking=True)
        if self.raw:
            return images
        return to_pixels(images)

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


def useful_workers(wanted: int, batches: int) -> int:
    """At most one per core and one per batch; none for a single batch, which would be waited for all the same."""
    if batches <= 1:
        return 0
    return min(wanted, usable_cores(), batches)
