"""The data set that a recipe names, and which of its images are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from timm.utils.misc import natural_key
from torch import Tensor

from vitruvius._errors import DataError, suggest
from vitruvius.data._cache import in_memory
from vitruvius.data._classes import IMAGENET
from vitruvius.data._config import DataConfig
from vitruvius.data._decoding import ImageSet
from vitruvius.data._folder import check_num_classes, open_folder, open_hugging_face
from vitruvius.data._noise import seed_of
from vitruvius.data._npz import open_npz
from vitruvius.data._preprocessing import Preprocessing
from vitruvius.data._raw import open_raw
from vitruvius.data._stored import open_stored
from vitruvius.data._tensors import TensorSet, digits, fake
from vitruvius.data._torchvision import open_torchvision

AnySet = TensorSet | ImageSet
_BY_NAME: dict[str, Callable[[DataConfig, str], AnySet]] = {
    "tensors": open_stored,
    "npz": open_npz,
    "bin": open_raw,
    "folder": open_folder,
    "torch": open_torchvision,
    "hfds": open_hugging_face,
}
_WITH_SLASH = ("bin", "torch", "hfds")
_CLASSES = ("folder", "torch")  # whose classes have names that `data.classes` can choose
KNOWN = ("digits", "fake", "tensors", "npz", "bin/…", "folder", "torch/…", "hfds/…", "hfids/…", "tfds/…", "wds/…")


def open_data(config: DataConfig, split: str, size: tuple[int, int, int]) -> AnySet:
    """The data set a recipe names; everything that can be wrong with it is said here."""
    kind, slash, _ = config.dataset.partition("/")
    if config.classes is not None and kind not in _CLASSES:
        raise DataError(f"data.classes chooses classes by name, {config.dataset} has none; use a folder or torch/….")
    if config.class_map == IMAGENET and kind != "folder":
        raise DataError(f"data.class_map={IMAGENET} numbers folders named by WordNet ids; {config.dataset} has none.")
    if config.dataset == "digits":
        return _checked(digits(split, config.train_split, config.val_split), config)
    if config.dataset == "fake":
        return fake(config, split, size)
    if kind in _BY_NAME and bool(slash) == (kind in _WITH_SLASH):
        return _BY_NAME[kind](config, split)
    raise DataError(f"no data set named {config.dataset!r}{suggest(config.dataset, KNOWN)} Known: {', '.join(KNOWN)}.")


def chosen_ids(data: AnySet, limit: int | None, *, without: Tensor | None = None, only: Tensor | None = None) -> Tensor:
    """All images, at most `limit` of them (a fixed random choice), or the ones that are asked for."""
    number = len(data)
    if only is not None:
        if len(only) and not 0 <= int(only.min()) <= int(only.max()) < number:
            raise DataError(f"{data.name} has {number} images; ids must lie between 0 and {number - 1}.")
        return only
    ids = torch.arange(number) if limit is None or limit >= number else choice(number, limit, seed=0)
    return ids if without is None else ids[~torch.isin(ids, without)]


def choice(number: int, count: int, seed: int) -> Tensor:
    """`count` of `number` ids, sorted."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randperm(number, generator=generator)[:count].sort().values


def chosen_files(files: Sequence[str], limit: int) -> list[str]:
    """Of the JPEG and PNG images `class/file` of a folder those that `data.val_num_samples` takes, in natural order."""
    ordered = sorted(files, key=natural_key)
    return [ordered[place] for place in choice(len(ordered), limit, seed=0).tolist()]


def cached(
    data: AnySet, ids: Tensor, pre: Preprocessing, config: DataConfig, *, training: bool
) -> tuple[AnySet, Tensor]:
    """The images in memory if the recipe wants them there, and the ids of those that could be decoded."""
    if config.cache != "memory" or isinstance(data, TensorSet):
        return data, ids
    tensors = in_memory(data, ids, pre, config, training=training)
    assert tensors.rows is not None
    return tensors, ids[tensors.rows[ids] >= 0]


def _checked(data: TensorSet, config: DataConfig) -> TensorSet:
    return replace(data, num_classes=check_num_classes(config, data.name, data.num_classes))
