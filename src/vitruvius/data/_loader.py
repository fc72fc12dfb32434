"""What every loader can do: batches of pixels in [0, 1], with or without the images' ids, from any batch on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images float32 (B, C, H, W) in [0, 1], labels int64 (B,)
BatchWithIds = tuple[Tensor, Tensor, Tensor]  # and ids int64 (B,) on the CPU: positions in the split


class Loader(Protocol):
    """Batches of one split, for one process."""

    name: str  # data set and split
    num_images: int  # of the whole split, over all processes
    num_classes: int
    broken: list[str]  # images that could not be decoded and were skipped, so far

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def with_ids(self) -> Iterator[BatchWithIds]:
        """Batches together with the ids of their images; one of which nothing could be read is left out."""
        ...

    def every_batch(self) -> Iterator[BatchWithIds]:
        """As `with_ids`, but a batch of which nothing could be read is there, and empty: its number counts."""
        ...

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the order and the random numbers of an epoch; iteration then begins at `start_batch`."""
        ...


class BatchLoader(ABC):
    """Common part of the loaders of this room."""

    def __init__(self, name: str, num_images: int, num_classes: int, device: torch.device | str) -> None:
        self.name, self.num_images, self.num_classes = name, num_images, num_classes
        self.device = torch.device(device)
        self.broken: list[str] = []
        self.epoch = self.start_batch = 0
        self.preprocessing: object = None
        self.sources: tuple[tuple[Any, Tensor], ...] = ()  # sets of images and the ids that are used, for `identity_of`

    def came_from(self, preprocessing: object, *sources: tuple[Any, Tensor]) -> Self:
        """Note what the loader was made of: how images are prepared, and the sets with the ids that are used."""
        self.preprocessing = preprocessing
        self.sources = sources
        return self

    def __iter__(self) -> Iterator[Batch]:
        for images, labels, _ in self.with_ids():
            yield images, labels

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def with_ids(self) -> Iterator[BatchWithIds]: ...

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the order and the random numbers of an epoch; iteration then begins at `start_batch`."""
        self.epoch, self.start_batch = epoch, start_batch

    def every_batch(self) -> Iterator[BatchWithIds]:
        """As `with_ids`, but a batch of which nothing could be read is there, and empty: its number counts."""
        return self.with_ids()
