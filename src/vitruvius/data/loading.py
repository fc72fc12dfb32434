"""From a recipe to loaders: `train_loader`, `eval_loader`, `images_loader` and `held_out`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius._random import seed_of
from vitruvius.data._config import DataConfig, Mix
from vitruvius.data.base import AnySet, InputSize, TensorSet, choice, chosen_ids, is_stream, open_data
from vitruvius.data.cache import cached
from vitruvius.data.classes import subset_ids
from vitruvius.data.loader import ImageLoader, Loader, MixedLoader, TensorLoader
from vitruvius.data.order import Endless, Order
from vitruvius.data.preprocessing import (
    Preprocessing,
    eval_transform,
    needs_pil,
    only_what_is_asked,
    resolve,
    train_transform,
)


def train_loader(
    config: DataConfig,
    *,
    input_size: InputSize,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    exclude: Tensor | None = None,
) -> Loader:
    """Shuffled, augmented whole batches of the training split, without the images `exclude`.

    With `data.mix` a part of every batch comes from a second data set; with `data.aug_splits` = S a batch of B images
    has S·B: all of them clean, then all of them augmented, S - 1 times.

    config: the data section of a recipe.
    input_size: timm's data config of the model, or (channels, height, width).
    seed: of order and augmentation.
    rank, world_size: of this process among those that share every epoch.
    device: where batches go.
    exclude: ids of images that are left out.
    """
    pre = resolve(config, input_size)
    part: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size}
    if is_stream(config):
        return _stream_loader(config, config.train_split, pre, device, ids=exclude, training=True, **part)
    data = open_data(config, config.train_split, pre.size)
    ids = chosen_ids(data, config.train_num_samples, without=exclude)
    mix = config.mix
    if mix is not None:
        return _mixed_loader(config, mix, data, ids, pre, device, **part)
    images, readable = cached(data, ids, pre, config, training=True)
    order = Order(readable, batch_size=config.batch_size, shuffle=True, repeats=config.aug_repeats, **part)
    (loader,) = _training_loaders([images], [order], pre, config, device)
    return loader.came_from(pre, (data, ids))


def eval_loader(
    config: DataConfig,
    *,
    input_size: InputSize,
    split: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    only: Tensor | None = None,
) -> Loader:
    """Every image of a split once, or only the images `only`; `split` is the recipe's validation split by default.

    The other arguments are those of `train_loader`. Of the validation split, `data.val_num_samples` and `data.subset`
    may choose some of the images.
    """
    pre = resolve(config, input_size)
    part: dict[str, Any] = {"rank": rank, "world_size": world_size}
    split = config.val_split if split is None else split
    if is_stream(config):
        return _stream_loader(config, split, pre, device, ids=only, training=False, **part)
    data = open_data(config, split, pre.size)
    if config.subset is not None and only is None and split == config.val_split:
        only = subset_ids(config.subset, data)
    ids = chosen_ids(data, config.val_num_samples if split == config.val_split else None, only=only)
    images, readable = cached(data, ids, pre, config, training=False)
    loader = images_loader(images, config, input_size=input_size, only=readable, device=device, **part)
    return loader.came_from(pre, (data, ids))


def images_loader(
    images: AnySet,
    config: DataConfig,
    *,
    input_size: InputSize,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    only: Tensor | None = None,
) -> Loader:
    """Each of these images once, or only the images `only`, prepared for evaluation as the model wants them.

    images: anything with a name, a number of classes, a length, `read(index)` → (PIL image, label) and
        `describe(index)`, decoded by `config.workers` processes; or a `TensorSet`, which stays in memory.
    config: of which count the batch sizes, `workers`, `broken`, and what overrules the model: `image_size`, `crop_pct`
        and their like.

    The other arguments are those of `train_loader`.
    """
    pre, ids = resolve(config, input_size), chosen_ids(images, None, only=only)
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=rank, world_size=world_size)
    loader: Loader
    if isinstance(images, TensorSet):
        loader = TensorLoader(images, order, pre, config, device)
    else:
        loader = ImageLoader(images, order, eval_transform(pre), config, channels=pre.size[0], device=device)
    return loader.came_from(pre, (images, ids))


def held_out(config: DataConfig, fraction: float, *, seed: int = 0) -> Tensor:
    """Ids of a random part of the training split, sorted: `exclude` for training, `only` for choosing a model."""
    if is_stream(config):
        raise ConfigError(
            f"{config.dataset} is a stream; nothing can be held out. Say train.holdout=0, and name a split of its own "
            "or, if it is TensorFlow's, a part: data.train_split=train[5%:] data.val_split=train[:5%]."
        )
    ids = chosen_ids(open_data(config, config.train_split, (1, 1, 1)), config.train_num_samples)
    count = round(len(ids) * fraction)
    if not 0 < count < len(ids):
        raise DataError(f"cannot hold out {fraction} of {len(ids)} training images; choose a fraction between 0 and 1.")
    return ids[choice(len(ids), count, seed)]


def _stream_loader(
    config: DataConfig,
    split: str,
    pre: Preprocessing,
    device: torch.device | str,
    *,
    ids: Tensor | None,
    training: bool,
    **part: Any,
) -> Loader:
    from vitruvius.data.sources.streams import Share, StreamLoader, open_stream

    if ids is not None:
        raise DataError(f"{config.dataset} is a stream; single images can be neither chosen nor left out.")
    share = Share(training=training, **part)
    stream = open_stream(config, split, pre.size, training=training, seed=share.seed)
    transform = train_transform(config, pre) if training else eval_transform(pre)
    return StreamLoader(stream, share, transform, config, device)


def _training_loaders(
    sets: Sequence[AnySet],
    orders: Sequence[Order],
    pre: Preprocessing,
    config: DataConfig,
    device: torch.device | str,
) -> list[TensorLoader] | list[ImageLoader]:
    """One loader for each data set, all of one kind: what suits the first set is done to all."""
    first = sets[0]
    if isinstance(first, TensorSet):
        asked = _batch_config(first, config)
        if asked is not None or config.no_aug or not needs_pil(config):
            for one in sets:
                if not isinstance(one, TensorSet):
                    raise DataError(f"{first.name} is in memory, {one.name} is not; set data.cache=memory.")
            pairs: list[tuple[Any, Order]] = list(zip(sets, orders, strict=True))
            if asked is None:  # padded, flipped and erased
                alike = {"pad": first.pad, "hflip": first.hflip}
                return [TensorLoader(replace(one, **alike), order, pre, config, device) for one, order in pairs]
            from vitruvius.data.augmentation.pipeline import BatchAugmentation

            augmentation = BatchAugmentation(asked, pre)
            return [TensorLoader(one, order, pre, asked, device, augmentation) for one, order in pairs]
        config = only_what_is_asked(config)
    transform = train_transform(config, pre)
    return [
        ImageLoader(one, order, transform, config, channels=pre.size[0], device=device)
        for one, order in zip(sets, orders, strict=True)
    ]


def _batch_config(data: TensorSet, config: DataConfig) -> DataConfig | None:
    """What batches of these images are augmented by; None if padding, flipping and erasing are all there is to do.

    `cache: memory` does only what the recipe asks for; `auto` does what would be done to images one by one.
    """
    if config.cache == "none" or config.no_aug or not (data.decoded or needs_pil(config)):
        return None
    if config.cache == "auto" and data.decoded:
        return config
    return only_what_is_asked(replace(config, hflip=data.hflip) if config.hflip is None else config)


def _mixed_loader(
    config: DataConfig,
    mix: Mix,
    data: AnySet,
    ids: Tensor,
    pre: Preprocessing,
    device: torch.device | str,
    *,
    seed: int,
    rank: int,
    world_size: int,
) -> MixedLoader:
    """Two data sets in every batch, a fixed share of each: synthetic images beside real ones.

    Gowal et al. 2021, arXiv:2110.09468. The second set is opened, checked against the first and augmented like it.
    """
    other = _open_second(config, mix, data, pre)
    other_ids = chosen_ids(other, mix.num_samples)
    sources, offset = ((data, ids), (other, other_ids)), len(data)
    first, second = (cached(images, some, pre, config, training=True) for images, some in sources)
    if config.cache == "auto" and isinstance(first[0], TensorSet) != isinstance(second[0], TensorSet):
        (first, second), config = sources, replace(config, cache="none")  # both in memory, or none
    number = round(mix.fraction * config.batch_size)
    if not 0 < number < config.batch_size:
        share = f"data.mix.fraction = {mix.fraction} of a batch of {config.batch_size}"
        raise ConfigError(f"{share} leaves nothing of one of the two data sets.")
    images = mix.epoch_images or len(first[1])
    batches = images // (config.batch_size * world_size)
    if batches == 0:
        short = f"{images} images do not fill one batch of {config.batch_size} in each of {world_size} process(es)"
        raise DataError(f"{short}; choose a smaller batch_size or a larger data.mix.epoch_images.")
    part: dict[str, Any] = {"batches": batches, "rank": rank, "world_size": world_size}
    orders = [
        Endless(first[1], batch_size=config.batch_size - number, seed=seed, **part),
        Endless(second[1], batch_size=number, seed=seed_of(seed, 1), **part),
    ]
    loaders = _training_loaders((first[0], second[0]), orders, pre, config, device)
    mixed = MixedLoader(*loaders, offset=offset, seed=seed, splits=max(1, config.aug_splits))
    return mixed.came_from(pre, *sources)


def _open_second(config: DataConfig, mix: Mix, data: AnySet, pre: Preprocessing) -> AnySet:
    """The second data set, whose labels must mean the same."""
    if is_stream(replace(config, dataset=mix.dataset)):
        raise DataError(f"data.mix.dataset = {mix.dataset} is a stream; choose a data set with random access.")
    asked = replace(
        config,
        dataset=mix.dataset,
        root=mix.root,
        train_split=mix.train_split,
        class_map=mix.class_map,
        classes=config.classes if mix.dataset == "folder" and not mix.class_map else None,
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
        advice = "give both the same with data.class_map and data.mix.class_map."
        raise DataError(f"data.mix: {other.name} numbers its classes otherwise than {data.name}; {advice}")
    return other
