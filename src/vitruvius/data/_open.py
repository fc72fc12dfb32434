"""From a recipe to loaders: the verbs `train_loader`, `eval_loader`, `images_loader` and `held_out`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.data._cache import cached
from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import ImageLoader, ImageSet
from vitruvius.data._loader import BatchLoader, Loader
from vitruvius.data._mixed_loader import mixed_loader
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import InputSize, eval_transform, resolve, train_transform
from vitruvius.data._subsets import choice, chosen_ids, subset_ids
from vitruvius.data._tensors import TensorLoader, TensorSet
from vitruvius.data._training_loader import training_loaders
from vitruvius.data.sources import is_stream, open_data
from vitruvius.data.sources.streams import Share, StreamLoader, open_stream


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
    rank: of this process; default 0.
    world_size: number of processes, each of which gets its share of every epoch; default 1.
    device: where batches go; default the CPU.
    exclude: ids of images that are left out; default none.
    """
    pre, split = resolve(config, input_size), config.train_split
    part: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size}
    if is_stream(config):
        _refuse_ids(config, exclude)
        stream = open_stream(config, split, pre.size, training=True, seed=seed)
        return StreamLoader(stream, Share(training=True, **part), train_transform(config, pre), config, device)
    data = open_data(config, split, pre.size)
    ids = chosen_ids(data, config.train_num_samples, without=exclude)
    if config.mix is not None:
        return mixed_loader(config, data, ids, pre, device, part)
    source = (data, ids)
    data, ids = cached(data, ids, pre, config, training=True)
    order = Order(ids, batch_size=config.batch_size, shuffle=True, repeats=config.aug_repeats, **part)
    (loader,) = training_loaders([data], [order], pre, config, device)
    return loader.came_from(pre, source)


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

    config: the data section of a recipe.
    input_size: timm's data config of the model, or (channels, height, width).
    split: a name that the data set knows.
    rank: of this process; default 0.
    world_size: number of processes, each of which gets its share of the images; default 1.
    device: where batches go; default the CPU.
    only: ids of the images wanted; default all that `data.val_num_samples` leaves.
    """
    pre, split = resolve(config, input_size), config.val_split if split is None else split
    if is_stream(config):
        _refuse_ids(config, only)
        share = Share(training=False, rank=rank, world_size=world_size)
        return StreamLoader(
            open_stream(config, split, pre.size, training=False), share, eval_transform(pre), config, device
        )
    data = open_data(config, split, pre.size)
    if config.subset is not None and only is None and split == config.val_split:
        only = subset_ids(config.subset, data)
    ids = chosen_ids(data, config.val_num_samples if split == config.val_split else None, only=only)
    source = (data, ids)
    data, ids = cached(data, ids, pre, config, training=False)
    part: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device}
    return _images_loader(data, config, input_size=input_size, only=ids, **part).came_from(pre, source)


def held_out(config: DataConfig, fraction: float, *, seed: int = 0) -> Tensor:
    """Ids of a random part of the training split, sorted: `exclude` for training, `only` for choosing a model.

    `config` is the data section of a recipe; `fraction` of its training images, above 0 and below 1; `seed` chooses
    them (default 0).
    """
    if is_stream(config):
        raise DataError(f"{config.dataset} is a stream; nothing can be held out. Use a split of its own.")
    ids = chosen_ids(open_data(config, config.train_split, (1, 1, 1)), config.train_num_samples)
    count = round(len(ids) * fraction)
    if not 0 < count < len(ids):
        raise DataError(f"cannot hold out {fraction} of {len(ids)} training images; choose a fraction between 0 and 1.")
    return ids[choice(len(ids), count, seed)]


def images_loader(
    images: ImageSet | TensorSet,
    config: DataConfig,
    *,
    input_size: InputSize,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    only: Tensor | None = None,
) -> Loader:
    """Each of these images once, or only the images `only`, prepared for evaluation as the model wants them.

    `images` is anything with a name, a number of classes, a length, `read(index)` → (PIL image, label) and
    `describe(index)`, decoded by `config.workers` processes; or a `TensorSet`, which stays in memory. Of `config`
    count the batch sizes, `workers`, `broken`, and what overrules the model: `image_size`, `crop_pct` and their like.
    `input_size` is timm's data config of the model, or (channels, height, width).

    `rank` of `world_size` processes gets its share of the images (default: all); batches go to `device` (default: the
    CPU).
    """
    part: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device}
    return _images_loader(images, config, input_size=input_size, only=only, **part)


def _images_loader(
    images: ImageSet | TensorSet,
    config: DataConfig,
    *,
    input_size: InputSize,
    rank: int,
    world_size: int,
    device: torch.device | str,
    only: Tensor | None,
) -> BatchLoader:
    pre, ids = resolve(config, input_size), chosen_ids(images, None, only=only)
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=rank, world_size=world_size)
    loader: BatchLoader
    if isinstance(images, TensorSet):
        loader = TensorLoader(images, order, pre, config, device)
    else:
        loader = ImageLoader(images, order, eval_transform(pre), config, channels=pre.size[0], device=device)
    return loader.came_from(pre, (images, ids))


def _refuse_ids(config: DataConfig, ids: Tensor | None) -> None:
    if ids is not None:
        raise DataError(f"{config.dataset} is a stream; single images can be neither chosen nor left out.")
