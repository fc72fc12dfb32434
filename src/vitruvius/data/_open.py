"""From a recipe to loaders: the three verbs `train_loader`, `eval_loader` and `held_out`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitruvius._errors import DataError, suggest
from vitruvius.data._cache import in_memory
from vitruvius.data._config import DataConfig
from vitruvius.data._decoding import ImageSet
from vitruvius.data._folder import check_num_classes, open_folder, open_hugging_face
from vitruvius.data._image_loader import ImageLoader
from vitruvius.data._loader import Loader
from vitruvius.data._noise import seed_of
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import InputSize, eval_transform, gentle, needs_pil, resolve, train_transform
from vitruvius.data._stored import open_stored
from vitruvius.data._streams import PACKAGES, Share, StreamLoader, open_stream
from vitruvius.data._subsets import subset_ids
from vitruvius.data._tensors import TensorLoader, TensorSet, digits, fake
from vitruvius.data._torchvision import open_torchvision

_RANDOM_ACCESS: dict[str, Callable[[DataConfig, str], ImageSet]] = {
    "folder": open_folder,
    "torch": open_torchvision,
    "hfds": open_hugging_face,
}


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
    """Shuffled, augmented whole batches of the training split, without the images `exclude`."""
    pre, split = resolve(config, input_size), config.train_split
    if is_stream(config):
        _refuse_ids(config, exclude)
        stream = open_stream(config, split, pre, training=True, seed=seed)
        share = Share(training=True, seed=seed, rank=rank, world_size=world_size)
        return StreamLoader(stream, share, train_transform(config, pre), config, device)
    data = open_data(config, split, pre.size)
    ids = _ids(data, config.train_num_samples, without=exclude)
    if config.cache == "memory" and not isinstance(data, TensorSet):
        data, ids = _cached(in_memory(data, ids, pre, config, training=True), ids)
    part = {"seed": seed, "rank": rank, "world_size": world_size, "repeats": config.aug_repeats}
    order = Order(ids, batch_size=config.batch_size, shuffle=True, **part)
    if isinstance(data, TensorSet) and (config.no_aug or not needs_pil(config)):
        return TensorLoader(data, order, pre, config, device)
    config = gentle(config) if isinstance(data, TensorSet) else config
    return ImageLoader(data, order, train_transform(config, pre), config, channels=pre.size[0], device=device)


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
    """Every image of a split once, or only the images `only`; `split` is the recipe's validation split by default."""
    pre, split = resolve(config, input_size), config.val_split if split is None else split
    transform = eval_transform(pre)
    if is_stream(config):
        _refuse_ids(config, only)
        share = Share(training=False, rank=rank, world_size=world_size)
        return StreamLoader(open_stream(config, split, pre, training=False), share, transform, config, device)
    data = open_data(config, split, pre.size)
    if config.subset is not None and only is None and split == config.val_split:
        only = subset_ids(config.subset, data)
    ids = _ids(data, config.val_num_samples if split == config.val_split else None, only=only)
    if config.cache == "memory" and not isinstance(data, TensorSet):
        data, ids = _cached(in_memory(data, ids, pre, config, training=False), ids)
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=rank, world_size=world_size)
    if isinstance(data, TensorSet):
        return TensorLoader(data, order, pre, config, device)
    return ImageLoader(data, order, transform, config, channels=pre.size[0], device=device)


def held_out(config: DataConfig, fraction: float, *, seed: int = 0) -> Tensor:
    """Ids of a random part of the training split, sorted: `exclude` for training, `only` for choosing a model."""
    if is_stream(config):
        raise DataError(f"{config.dataset} is a stream; nothing can be held out. Use a split of its own.")
    ids = _ids(open_data(config, config.train_split, (1, 1, 1)), config.train_num_samples)
    count = round(len(ids) * fraction)
    if not 0 < count < len(ids):
        raise DataError(f"cannot hold out {fraction} of {len(ids)} training images; choose a fraction between 0 and 1.")
    return ids[_choice(len(ids), count, seed)]


def is_stream(config: DataConfig) -> bool:
    """Whether the data can only be read in order."""
    return config.dataset.partition("/")[0] in PACKAGES


def open_data(config: DataConfig, split: str, size: tuple[int, int, int]) -> TensorSet | ImageSet:
    """The data set a recipe names; everything that can be wrong with it is said here."""
    kind, slash, _ = config.dataset.partition("/")
    if config.dataset == "digits":
        return _checked(digits(split, config.train_split, config.val_split), config)
    if config.dataset == "fake":
        return fake(config, split, size)
    if config.dataset == "tensors":
        return open_stored(config, split)
    if kind in _RANDOM_ACCESS and bool(slash) == (kind != "folder"):
        return _RANDOM_ACCESS[kind](config, split)
    known = ("digits", "fake", "tensors", "folder", "torch/…", "hfds/…", "hfids/…", "tfds/…", "wds/…")
    raise DataError(f"no data set named {config.dataset!r}{suggest(config.dataset, known)} Known: {', '.join(known)}.")


def _checked(data: TensorSet, config: DataConfig) -> TensorSet:
    return replace(data, num_classes=check_num_classes(config, data.name, data.num_classes))


def _cached(data: TensorSet, ids: Tensor) -> tuple[TensorSet, Tensor]:
    """The tensors, and the ids of those images that could be decoded."""
    assert data.rows is not None
    return data, ids[data.rows[ids] >= 0]


def _refuse_ids(config: DataConfig, ids: Tensor | None) -> None:
    if ids is not None:
        raise DataError(f"{config.dataset} is a stream; single images can be neither chosen nor left out.")


def _ids(
    data: TensorSet | ImageSet, limit: int | None, *, without: Tensor | None = None, only: Tensor | None = None
) -> Tensor:
    number = len(data)
    if only is not None:
        if len(only) and not 0 <= int(only.min()) <= int(only.max()) < number:
            raise DataError(f"{data.name} has {number} images; ids must lie between 0 and {number - 1}.")
        return only
    ids = torch.arange(number) if limit is None or limit >= number else _choice(number, limit, seed=0)
    return ids if without is None else ids[~torch.isin(ids, without)]


def _choice(number: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randperm(number, generator=generator)[:count].sort().values
