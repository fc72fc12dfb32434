"""From `data.mix` to a loader: the second data set is opened, checked against the first and augmented like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.data._config import DataConfig, Mix
from vitruvius.data._mixing import Endless, MixedLoader
from vitruvius.data._noise import seed_of
from vitruvius.data._preprocessing import Preprocessing, gentle
from vitruvius.data._sources import AnySet, cached, chosen_ids, open_data
from vitruvius.data._streams import PACKAGES
from vitruvius.data._tensors import TensorLoader, TensorSet
from vitruvius.data._training_loader import make_image_loader, stays_in_tensors


def mixed_loader(
    config: DataConfig, data: AnySet, ids: Tensor, pre: Preprocessing, device: torch.device | str, part: dict[str, Any]
) -> MixedLoader:
    """Batches of the images `ids` of the first set and of the second one; `part` is seed, rank and world size."""
    mix = config.mixing
    assert mix is not None
    other, offset = open_second(config, mix, data, pre), len(data)
    data, ids = cached(data, ids, pre, config, training=True)
    other, other_ids = cached(other, chosen_ids(other, mix.num_samples), pre, config, training=True)
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
    loaders = _alike(data, other, orders, pre, config, device)
    return MixedLoader(*loaders, offset=offset, seed=part["seed"], splits=max(1, config.aug_splits))


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
    if mix.dataset.partition("/")[0] in PACKAGES:
        raise DataError(f"data.mix.dataset = {mix.dataset} is a stream; choose a data set with random access.")
    asked = replace(
        config,
        dataset=mix.dataset,
        root=mix.root,
        train_split=mix.train_split,
        class_map=mix.class_map,
        classes=None if mix.class_map else config.classes if mix.dataset == "folder" else None,
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


def _alike(
    data: AnySet,
    other: AnySet,
    orders: list[Endless],
    pre: Preprocessing,
    config: DataConfig,
    device: torch.device | str,
) -> list[Any]:
    """Two loaders of one kind: what suits the first set is done to both."""
    if not stays_in_tensors(data, config):
        config = gentle(config) if isinstance(data, TensorSet) else config
        pairs = zip((data, other), orders, strict=True)
        return [make_image_loader(one, order, pre, config, device) for one, order in pairs]
    assert isinstance(data, TensorSet)
    if not isinstance(other, TensorSet):
        raise DataError(f"{data.name} is in memory, {other.name} is not; set data.cache=memory.")
    other = replace(other, pad=data.pad, hflip=data.hflip)
    return [TensorLoader(one, order, pre, config, device) for one, order in zip((data, other), orders, strict=True)]
