"""torchvision's data sets: those of timm's factory, some more with a `split` argument, and Caltech-101."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision.datasets
from PIL import Image
from timm.data import create_dataset

from vitruvius._errors import DataError, suggest
from vitruvius.data._config import DataConfig
from vitruvius.data._image_seeds import image_keys
from vitruvius.data._subsets import class_names, require_classes
from vitruvius.data.sources._base import TRAIN_NAMES, VALIDATION_NAMES, Size, check_num_classes, data_source

_TIMM = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "inaturalist", "places365", "imagenet")
_TWO_SPLITS = _TIMM[:6]  # training or test
_MORE = {  # name: (class, training split, validation split)
    "svhn": ("SVHN", "train", "test"),
    "flowers102": ("Flowers102", "train", "val"),
    "food101": ("Food101", "train", "test"),
    "stl10": ("STL10", "train", "test"),
    "oxford_iiit_pet": ("OxfordIIITPet", "trainval", "test"),
    "dtd": ("DTD", "train", "val"),
    "gtsrb": ("GTSRB", "train", "test"),
}
_CLASSES = {"svhn": 10, "stl10": 10, "flowers102": 102, "gtsrb": 43}
_NAMES = ("caltech101", *_TIMM, *_MORE)
_CALTECH_TRAINING = 30  # images of each class, as is usual; all others are for validation


class TorchvisionImages:
    """A torchvision data set by number: all its images, or the `rows`; labels may be renumbered."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        num_classes: int,
        rows: Sequence[int] | None = None,
        numbers: dict[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.num_classes = num_classes
        self.rows = range(len(dataset)) if rows is None else rows
        self.numbers = numbers  # label → number, None: as they are

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.dataset[self.rows[index]]
        if self.numbers is not None:
            return image, self.numbers[int(label)]
        return image, int(label)

    def describe(self, index: int) -> str:
        return f"image {self.rows[index]} of {self.name}"


@data_source("torch", after_slash="<name>", class_names=True)
def open_torchvision(config: DataConfig, split: str, size: Size) -> TorchvisionImages:
    """A data set of torchvision, e.g. torch/cifar10, from the folder `root`; downloaded only if asked."""
    name = config.dataset.removeprefix("torch/").lower()
    if name not in _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise DataError(f"no torchvision data set {name!r}{suggest(name, _NAMES)} Known: {known}.")
    if config.root is None:
        raise DataError(f"data.root is not set; it must name the folder of {config.dataset}.")
    if name in (*_TWO_SPLITS, "caltech101") and split not in (*TRAIN_NAMES, *VALIDATION_NAMES, "test"):
        raise DataError(f"{config.dataset} has no split {split!r}; choose train or test.")
    try:
        dataset = _build(config, name, split)
    except (RuntimeError, OSError, ValueError) as error:
        said = f"cannot open {config.dataset} ({split}) in {config.root}: {error}"
        if not config.download:
            said += " Set data.root to its folder, or data.download=true."
        raise DataError(said) from error
    rows = None
    if name == "caltech101":
        rows = _caltech_rows(dataset, training=split in TRAIN_NAMES)
    place = f"{config.dataset}/{split}"
    if config.classes is not None:
        return _chosen(dataset, place, config, rows)
    return TorchvisionImages(dataset, place, check_num_classes(config, config.dataset, _found(name, dataset)), rows)


def _build(config: DataConfig, name: str, split: str) -> Any:
    if name == "caltech101":
        return torchvision.datasets.Caltech101(config.root, download=config.download)
    if name in _TIMM:
        dataset = create_dataset(f"torch/{name}", root=config.root, split=split, download=config.download)
        if name == "inaturalist":
            dataset.index.sort()  # torchvision lists files in the order of the disk; ids should not depend on it
        return dataset
    kind, training, validation = _MORE[name]
    if split in TRAIN_NAMES:
        split = training
    elif split in VALIDATION_NAMES:
        split = validation
    return getattr(torchvision.datasets, kind)(config.root, split=split, download=config.download)


def _found(name: str, dataset: Any) -> int | None:
    if name == "inaturalist":
        return _inaturalist_classes(dataset)
    names = _class_names(dataset)
    if names:
        return len(names)
    return _CLASSES.get(name)


def _inaturalist_classes(dataset: Any) -> int:
    if len(dataset.target_type) != 1:
        raise DataError(f"torch/inaturalist: one label per image, not {', '.join(dataset.target_type)}.")
    (rank,) = dataset.target_type
    if rank == "full":
        return len(dataset.all_categories)
    return len(dataset.categories_index[rank])


def _class_names(dataset: Any) -> list[str]:
    """ImageNet's classes by WordNet id, others by their names."""
    for attribute in ("wnids", "classes", "categories", "all_categories"):
        if names := getattr(dataset, attribute, None):
            return list(names)
    return []


def _caltech_rows(dataset: Any, *, training: bool) -> list[int]:
    """Caltech-101 comes without splits: the images of a class with the smallest hashed numbers train, for ever."""
    labels = torch.tensor(dataset.y)
    rank = image_keys(torch.arange(len(labels)), torch.zeros_like(labels), seed=0, epoch=0)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        chosen[members[rank[members].argsort()[:_CALTECH_TRAINING]]] = True
    rows: list[int] = (chosen if training else ~chosen).nonzero()[:, 0].tolist()
    return rows


def _chosen(dataset: Any, place: str, config: DataConfig, rows: Sequence[int] | None) -> TorchvisionImages:
    """Only the classes that `data.classes` lists, numbered in its order."""
    assert config.classes is not None
    wanted = class_names(config.classes)
    known = _class_names(dataset)
    labels = _labels(dataset)
    if not known or labels is None:
        raise DataError(f"data.classes: torchvision does not say which classes the images of {place} have.")
    require_classes(wanted, known, place)
    numbers = {known.index(name): number for number, name in enumerate(wanted)}
    if rows is None:
        rows = range(len(dataset))
    chosen = [row for row in rows if int(labels[row]) in numbers]
    return TorchvisionImages(dataset, place, check_num_classes(config, place, len(wanted)), chosen, numbers)


def _labels(dataset: Any) -> Any:
    """The labels of all images, under whichever name a class of torchvision keeps them; None if it does not."""
    for name in ("targets", "labels", "_labels", "y"):
        if hasattr(dataset, name):
            return getattr(dataset, name)
    return None
