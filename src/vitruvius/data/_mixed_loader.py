"""Two data sets in every training batch, a fixed share of each: synthetic images beside real ones (`data.mix`).

Gowal et al. 2021, arXiv:2110.09468. The second data set is opened, checked against the first and augmented like it.
Each set is an endless sequence of permutations, of which an epoch takes the next part, so every image of a set is used
equally often, whatever the lengths; a function of (seed, epoch) and nothing else.   B batch, S splits
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.data._cache import cached
from vitruvius.data._config import DataConfig, Mix
from vitruvius.data._image_seeds import image_keys, seed_of
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._preprocessing import Preprocessing
from vitruvius.data._subsets import chosen_ids
from vitruvius.data._tensors import TensorSet
from vitruvius.data._training_loader import training_loaders
from vitruvius.data.sources import AnySet, is_stream, open_data


def mixed_loader(
    config: DataConfig, data: AnySet, ids: Tensor, pre: Preprocessing, device: torch.device | str, part: dict[str, Any]
) -> MixedLoader:
    """Batches of the images `ids` of the first set and of the second one; `part` is seed, rank and world size."""
    mix = config.mix
    assert mix is not None
    offset = len(data)
    other = open_second(config, mix, data, pre)
    other_ids = chosen_ids(other, mix.num_samples)
    sources = ((data, ids), (other, other_ids))
    data, ids, other, other_ids, config = _cached_alike(data, ids, other, other_ids, pre, config)
    counts = counts_of(config.batch_size, mix.fraction)
    batches = (mix.epoch_images or len(ids)) // (config.batch_size * part["world_size"])
    if batches == 0:
        raise DataError(
            f"{mix.epoch_images or len(ids)} images do not fill one batch of {config.batch_size} in each of "
            f"{part['world_size']} process(es); choose a smaller batch_size or a larger data.mix.epoch_images."
        )
    seeds = (part["seed"], seed_of(part["seed"], 1))
    orders = [
        Endless(some, **{**part, "seed": seed}, batch_size=count, batches=batches)
        for some, seed, count in zip((ids, other_ids), seeds, counts, strict=True)
    ]
    first, second = training_loaders((data, other), orders, pre, config, device)
    mixed = MixedLoader(first, second, offset=offset, seed=part["seed"], splits=max(1, config.aug_splits))
    return mixed.came_from(pre, *sources)


def counts_of(batch_size: int, fraction: float) -> tuple[int, int]:
    """Images of the first and of the second set in a batch."""
    second = round(fraction * batch_size)
    if not 0 < second < batch_size:
        raise ConfigError(
            f"data.mix.fraction = {fraction} of a batch of {batch_size} leaves nothing of one of the two data sets."
        )
    return batch_size - second, second


def open_second(config: DataConfig, mix: Mix, data: AnySet, pre: Preprocessing) -> AnySet:
    """The second data set, whose labels must mean the same."""
    if is_stream(replace(config, dataset=mix.dataset)):
        raise DataError(f"data.mix.dataset = {mix.dataset} is a stream; choose a data set with random access.")
    classes = None
    if mix.dataset == "folder" and not mix.class_map:
        classes = config.classes
    asked = replace(
        config,
        dataset=mix.dataset,
        root=mix.root,
        train_split=mix.train_split,
        class_map=mix.class_map,
        classes=classes,
        train_num_samples=mix.num_samples,
        num_classes=None,
        download=mix.download,
        mix=None,
    )
    other = open_data(asked, mix.train_split, pre.size)
    if other.num_classes > data.num_classes:
        raise DataError(f"data.mix: {other.name} has {other.num_classes} classes, {data.name} {data.num_classes}.")
    names, others = (getattr(getattr(one, "reader", None), "class_to_idx", None) for one in (data, other))
    if names and others and any(names.get(name) != number for name, number in others.items()):
        raise DataError(
            f"data.mix: {other.name} numbers its classes otherwise than {data.name}; give both the same classes "
            "with data.class_map and data.mix.class_map."
        )
    return other


def _cached_alike(
    data: AnySet, ids: Tensor, other: AnySet, other_ids: Tensor, pre: Preprocessing, config: DataConfig
) -> tuple[AnySet, Tensor, AnySet, Tensor, DataConfig]:
    """Both sets in memory if the recipe says so; with `auto` both or none."""
    first, first_ids = cached(data, ids, pre, config, training=True)
    second, second_ids = cached(other, other_ids, pre, config, training=True)
    together = isinstance(first, TensorSet) == isinstance(second, TensorSet)
    if config.cache == "auto" and not together:
        return data, ids, other, other_ids, replace(config, cache="none")
    return first, first_ids, second, second_ids, config


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
        return (batch for batch in self.every_batch() if len(batch[0]))

    def every_batch(self) -> Iterator[BatchWithIds]:
        first, second = self.parts
        first.set_epoch(self.epoch, self.start_batch)
        second.set_epoch(self.epoch, self.start_batch)
        pairs = zip(first.every_batch(), second.every_batch(), strict=True)
        for number, (batch, other) in enumerate(pairs, self.start_batch):
            self.broken = [*first.broken, *second.broken]
            images, labels, ids = other
            present = [one for one in (batch, (images, labels, ids + self.offset)) if len(one[0])]
            if present:
                yield self._joined(present, number)
            else:
                yield batch

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
