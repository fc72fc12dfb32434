"""Which images a process sees, in which order and in which batch; a function of (seed, epoch) and nothing else.

Training: one permutation of all images, every process taking the next one in turn, whole batches only; or an endless
sequence of permutations, of which an epoch takes the next part. Evaluation: images in their order, each exactly once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius._random import image_keys, seed_of

_ROUND = 256  # repeated augmentation selects a multiple of this many images, as DeiT and timm do


class Order:
    """The batches of one process. `ids` (N,) are the images to use."""

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
            short = (
                f"{len(ids)} training images do not fill one batch of {batch_size} in each of {world_size} process(es)"
            )
            raise DataError(f"{short}; choose a smaller batch_size.")

    def __len__(self) -> int:
        """Batches in an epoch."""
        number = len(self.ids)
        if not self.shuffle:
            return math.ceil(len(range(self.rank, number, self.world_size)) / self.batch_size)
        if self.repeats > 1 and number >= _ROUND:
            number = number // _ROUND * _ROUND
        return number // self.world_size // self.batch_size

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(ids, keys) of this process, in order; the keys seed the augmentation of each image."""
        ids, repeats = self.ids, torch.zeros_like(self.ids)
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            ids = ids[torch.randperm(len(ids), generator=generator)]
            repeats = torch.arange(self.repeats).repeat(len(ids))  # neighbours go to different processes
            ids = ids.repeat_interleave(self.repeats)
        mine = slice(self.rank, None, self.world_size)
        limit = len(self) * self.batch_size
        ids, repeats = ids[mine][:limit], repeats[mine][:limit]
        return ids, image_keys(ids, repeats, seed=self.seed, epoch=epoch)


class Endless(Order):
    """One set's share of the mixed batches of one process: `batch_size` images in each of `batches` an epoch.

    An endless sequence of permutations, so every image is used equally often, whatever the length of an epoch.
    """

    def __init__(
        self, ids: Tensor, *, batch_size: int, batches: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if not len(ids):
            raise DataError("a data set to be mixed has no images.")
        self.batches = batches
        super().__init__(ids, batch_size=batch_size, shuffle=True, seed=seed, rank=rank, world_size=world_size)
        self._last = (-1, ids)  # one permutation of millions of images lasts for many epochs and takes seconds to make

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(ids, keys) of this process, in order; an image that comes twice in an epoch has two keys."""
        number, length = len(self.ids), self.batches * self.batch_size * self.world_size
        first = epoch * length
        laps = range(first // number, (first + length - 1) // number + 1)
        start = first - laps[0] * number
        ids = torch.cat([self._permutation(lap) for lap in laps])[start : start + length][self.rank :: self.world_size]
        lap = torch.arange(first, first + length)[self.rank :: self.world_size] // number
        return ids, image_keys(ids, lap, seed=self.seed, epoch=epoch)

    def _permutation(self, lap: int) -> Tensor:
        if lap != self._last[0]:
            generator = torch.Generator().manual_seed(seed_of(self.seed, lap))
            self._last = (lap, self.ids[torch.randperm(len(self.ids), generator=generator)])
        return self._last[1]
