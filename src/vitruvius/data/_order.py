"""Which images a process sees, in which order and in which batch; a function of (seed, epoch) and nothing else.

Training: one permutation of all images, dealt out to the processes like cards, whole batches only.
Evaluation: images in their order, dealt out likewise, each exactly once.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.data._image_seeds import image_keys, seed_of

_ROUND = 256  # repeated augmentation selects a multiple of this many images, as DeiT and timm do


class AnyOrder(Protocol):
    """What a loader asks of an order."""

    ids: Tensor
    batch_size: int
    shuffle: bool

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, /) -> tuple[Tensor, Tensor]: ...


class Order:
    """The batches of one process. `ids` are the images to use, (N,)."""

    def __init__(
        self,
        ids: Tensor,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is not one of {world_size} processes.")
        self.ids, self.batch_size, self.shuffle, self.seed = ids, batch_size, shuffle, seed
        self.rank, self.world_size, self.repeats = rank, world_size, max(1, repeats)
        if shuffle and len(self) == 0:
            raise DataError(
                f"{len(ids)} training images do not fill one batch of {batch_size} in each of {world_size} "
                "process(es); choose a smaller batch_size."
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        mine = self._images_per_process()
        return mine // self.batch_size if self.shuffle else math.ceil(mine / self.batch_size)

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(ids, keys) of this process, in order; the keys seed the augmentation of each image."""
        ids, repeats = self.ids, torch.zeros_like(self.ids)
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            ids, repeats = repeat(ids[torch.randperm(len(ids), generator=generator)], self.repeats)
        mine = slice(self.rank, None, self.world_size)
        limit = len(self) * self.batch_size
        ids, repeats = ids[mine][:limit], repeats[mine][:limit]
        return ids, image_keys(ids, repeats, seed=self.seed, epoch=epoch)

    def _images_per_process(self) -> int:
        number = len(self.ids)
        if not self.shuffle:
            return len(range(self.rank, number, self.world_size))
        if self.repeats > 1 and number >= _ROUND:
            number = number // _ROUND * _ROUND
        return number // self.world_size


def repeat(ids: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Each image `times` times in a row, and which time it is: neighbours go to different processes."""
    return ids.repeat_interleave(times), torch.arange(times).repeat(len(ids))
