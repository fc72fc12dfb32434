"""Images that are decoded as they are needed, by worker processes, in an order and with a luck that ignore them.

Workers hand over uint8, which becomes float on the device. Each image's augmentation is seeded by its key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler

from vitruvius._errors import DataError
from vitruvius.data._config import DataConfig
from vitruvius.data._decoding import Decoded, ImageSet, collate, pil_mode
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._order import AnyOrder
from vitruvius.data._preprocessing import Transform, to_pixels

logger = logging.getLogger(__name__)


class Batches(Sampler[list[tuple[int, int]]]):
    """Lists of (index, key); the loader sets epoch and start."""

    def __init__(self, order: AnyOrder) -> None:
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
            images = torch.empty(0) if batch.images is None else batch.images.to(self.device, non_blocking=True)
            yield images if self.raw else to_pixels(images), batch.labels.to(self.device), batch.ids
        if new := self.broken[already:]:
            logger.warning("skipped %d broken image(s) of %s: %s", len(new), self.name, ", ".join(new))

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
    """At most one a core and one a batch; none for a single batch, which would be waited for all the same."""
    return min(wanted, usable_cores(), batches if batches > 1 else 0)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
