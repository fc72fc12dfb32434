"""Two data sets in every training batch, a fixed share of each: synthetic images beside real ones.

Gowal et al. 2021, arXiv:2110.09468. Each set is a row of permutations without end, of which an epoch takes the next
part, so every image of a set is used equally often, whatever the lengths; a function of (seed, epoch) and nothing else.
B batch, S splits
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._noise import image_keys, seed_of


class Endless:
    """One set's share of the mixed batches of one process: `batch_size` images in each of `batches` an epoch."""

    shuffle = True

    def __init__(
        self, ids: Tensor, *, batch_size: int, batches: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if not len(ids):
            raise DataError("a data set to be mixed has no images.")
        self.ids, self.batch_size, self.batches, self.seed = ids, batch_size, batches, seed
        self.rank, self.world_size = rank, world_size
        self._last = (-1, ids)  # a lap of millions of images lasts for many epochs and takes seconds to shuffle

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(ids, keys) of this process, in order; an image that comes twice in an epoch has two keys."""
        number, length = len(self.ids), self.batches * self.batch_size * self.world_size
        first = epoch * length
        laps = range(first // number, (first + length - 1) // number + 1)
        start = first - laps[0] * number
        ids = torch.cat([self._lap(lap) for lap in laps])[start : start + length][self.rank :: self.world_size]
        lap = torch.arange(first, first + length)[self.rank :: self.world_size] // number
        return ids, image_keys(ids, lap, seed=self.seed, epoch=epoch)

    def _lap(self, lap: int) -> Tensor:
        if lap != self._last[0]:
            generator = torch.Generator().manual_seed(seed_of(self.seed, lap))
            self._last = (lap, self.ids[torch.randperm(len(self.ids), generator=generator)])
        return self._last[1]


class MixedLoader(BatchLoader):
    """Batches of two loaders put together and shuffled; ids of the second set begin where those of the first end."""

    def __init__(self, first: BatchLoader, second: BatchLoader, *, offset: int, seed: int, splits: int = 1) -> None:
        images = first.num_images + second.num_images
        super().__init__(f"{first.name} + {second.name}", images, first.num_classes, first.device)
        self.parts, self.offset, self.seed, self.splits = (first, second), offset, seed, splits

    def __len__(self) -> int:
        return len(self.parts[0])

    def with_ids(self) -> Iterator[BatchWithIds]:
        for part in self.parts:
            part.set_epoch(self.epoch, self.start_batch)
        pairs = zip(*(part.every_batch() for part in self.parts), strict=True)
        for number, (first, second) in enumerate(pairs, self.start_batch):
            self.broken = [name for part in self.parts for name in part.broken]
            second = (*second[:2], second[2] + self.offset)
            present = [batch for batch in (first, second) if len(batch[0])]
            if present:
                yield self._joined(present, number)

    def _joined(self, batches: list[BatchWithIds], number: int) -> BatchWithIds:
        """All splits (S, B) are shuffled alike, so that an image keeps its place in each of them."""
        count = sum(len(ids) for _, _, ids in batches) // self.splits
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch, number))
        place = torch.randperm(count, generator=generator)
        images, labels, ids = (self._shuffled([batch[i] for batch in batches], place) for i in range(3))
        return images, labels, ids

    def _shuffled(self, tensors: list[Tensor], place: Tensor) -> Tensor:
        together = torch.cat([t.unflatten(0, (self.splits, -1)) for t in tensors], dim=1)
        return together[:, place.to(together.device)].flatten(0, 1)
