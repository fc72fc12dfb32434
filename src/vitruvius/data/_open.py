"""From a recipe to loaders: the three verbs `train_loader`, `eval_loader` and `held_out`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitruvius._errors import DataError, suggest
from vitruvius.data._config import DataConfig
from vitruvius.data._folder import open_folder
from vitruvius.data._image_loader import ImageLoader, ImageSet
from vitruvius.data._loader import Loader
from vitruvius.data._noise import seed_of
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import (
    InputSize,
    Preprocessing,
    eval_transform,
    gentle,
    needs_pil,
    resolve,
    train_transform,
)
from vitruvius.data._tensors import TensorLoader, TensorSet, digits, fake
from vitruvius.data._torchvision import open_torchvision


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
    pre = resolve(config, input_size)
    data = open_data(config, config.train_split, pre)
    ids = _ids(len(data), config.train_num_samples, without=exclude)
    order = Order(
        ids,
        batch_size=config.batch_size,
        shuffle=True,
        seed=seed,
        rank=rank,
        world_size=world_size,
        repeats=config.aug_repeats,
    )
    if isinstance(data, TensorSet):
        if not needs_pil(config):
            return TensorLoader(data, order, pre, config, device)
        config = gentle(config)
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
    pre = resolve(config, input_size)
    split = config.val_split if split is None else split
    data = open_data(config, split, pre)
    limit = config.val_num_samples if split == config.val_split else None
    ids = _ids(len(data), limit) if only is None else only
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=rank, world_size=world_size)
    if isinstance(data, TensorSet):
        return TensorLoader(data, order, pre, config, device)
    return ImageLoader(data, order, eval_transform(pre), config, channels=pre.size[0], device=device)


def held_out(config: DataConfig, fraction: float, *, seed: int = 0) -> Tensor:
    """Ids of a random part of the training split, sorted: `exclude` for training, `only` for choosing a model."""
    number = len(open_data(config, config.train_split, resolve(config, (3, 1, 1))))
    if not 0 < fraction < 1 or round(number * fraction) in (0, number):
        raise DataError(f"cannot hold out {fraction} of {number} training images; choose a fraction between 0 and 1.")
    return _choice(number, round(number * fraction), seed)


def open_data(config: DataConfig, split: str, pre: Preprocessing) -> TensorSet | ImageSet:
    """The data set a recipe names; everything that can be wrong with it is said here."""
    name, _, rest = config.dataset.partition("/")
    if name == "digits" and not rest:
        return digits(split, config.train_split, config.val_split)
    if name == "fake" and not rest:
        return fake(config, split, pre.size)
    openers: dict[str, Callable[[DataConfig, str], ImageSet]] = {"folder": open_folder, "torch": open_torchvision}
    if name in openers and bool(rest) == (name != "folder"):
        return openers[name](config, split)
    known = ("digits", "fake", "folder", "torch/cifar10")
    raise DataError(
        f"no data set named {config.dataset!r}{suggest(config.dataset, known)} Known: {', '.join(known)}, …"
    )


def _ids(number: int, limit: int | None, without: Tensor | None = None) -> Tensor:
    ids = torch.arange(number) if limit is None or limit >= number else _choice(number, limit, seed=0)
    return ids if without is None else ids[~torch.isin(ids, without)]


def _choice(number: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randperm(number, generator=generator)[:count].sort().values
