"""How training images are augmented: whole batches on their device where that is wanted, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vitruvius._errors import DataError
from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import ImageLoader
from vitruvius.data._order import AnyOrder
from vitruvius.data._preprocessing import Preprocessing, gentle, needs_pil, train_transform
from vitruvius.data._tensors import TensorLoader, TensorSet
from vitruvius.data.augmentation.pipeline import BatchAugmentation
from vitruvius.data.sources import AnySet


def training_loaders(
    sets: Sequence[AnySet],
    orders: Sequence[AnyOrder],
    pre: Preprocessing,
    config: DataConfig,
    device: torch.device | str,
) -> list[TensorLoader] | list[ImageLoader]:
    """One loader for each data set, all of one kind: what suits the first set is done to all."""
    first = sets[0]
    if isinstance(first, TensorSet):
        asked = batch_config(first, config)
        if asked is not None:
            return _batched(sets, orders, pre, asked, device, BatchAugmentation(asked, pre))
        if config.no_aug or not needs_pil(config):
            alike = [replace(one, pad=first.pad, hflip=first.hflip) for one in _in_memory(sets)]
            return _batched(alike, orders, pre, config, device, None)
        config = gentle(config)
    transform = train_transform(config, pre)
    channels = pre.size[0]
    return [
        ImageLoader(one, order, transform, config, channels=channels, device=device)
        for one, order in zip(sets, orders, strict=True)
    ]


def batch_config(data: TensorSet, config: DataConfig) -> DataConfig | None:
    """What batches of these images are augmented by; None if padding, flipping and erasing are all there is to do.

    `cache: memory` does only what the recipe asks for; `auto` does what would be done to images one by one.
    """
    if config.cache == "none" or config.no_aug or not (data.decoded or needs_pil(config)):
        return None
    if config.cache == "auto" and data.decoded:
        return config
    if config.hflip is None:
        config = replace(config, hflip=data.hflip)
    return gentle(config)


def _batched(
    sets: Sequence[AnySet],
    orders: Sequence[AnyOrder],
    pre: Preprocessing,
    config: DataConfig,
    device: torch.device | str,
    augmentation: BatchAugmentation | None,
) -> list[TensorLoader]:
    pairs = zip(_in_memory(sets), orders, strict=True)
    return [TensorLoader(one, order, pre, config, device, augmentation) for one, order in pairs]


def _in_memory(sets: Sequence[AnySet]) -> list[TensorSet]:
    tensors = [one for one in sets if isinstance(one, TensorSet)]
    for one in sets:
        if not isinstance(one, TensorSet):
            raise DataError(f"{tensors[0].name} is in memory, {one.name} is not; set data.cache=memory.")
    return tensors
