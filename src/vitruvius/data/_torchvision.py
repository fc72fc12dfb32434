"""torchvision's data sets: those of timm's factory, and some more with a `split` argument."""

from __future__ import annotations

from typing import Any

import torchvision.datasets
from PIL import Image
from timm.data import create_dataset

from vitruvius._errors import DataError, suggest
from vitruvius.data._config import DataConfig
from vitruvius.data._folder import TRAIN_NAMES, VALIDATION_NAMES, check_num_classes

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


class TorchvisionImages:
    """A torchvision data set by number."""

    def __init__(self, dataset: Any, name: str, num_classes: int) -> None:
        self.dataset, self.name, self.num_classes = dataset, name, num_classes

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.dataset[index]
        return image, int(label)

    def describe(self, index: int) -> str:
        return f"image {index} of {self.name}"


def open_torchvision(config: DataConfig, split: str) -> TorchvisionImages:
    """`torch/cifar10` and the like, from `root`; downloaded only if asked."""
    name = config.dataset.removeprefix("torch/").lower()
    if name not in (*_TIMM, *_MORE):
        known = ", ".join(sorted((*_TIMM, *_MORE)))
        raise DataError(f"no torchvision data set {name!r}{suggest(name, (*_TIMM, *_MORE))} Known: {known}.")
    if config.root is None:
        raise DataError(f"data.root is not set; it must name the folder of {config.dataset}.")
    if name in _TWO_SPLITS and split not in (*TRAIN_NAMES, *VALIDATION_NAMES, "test"):
        raise DataError(f"{config.dataset} has no split {split!r}; choose train or test.")
    try:
        dataset = _build(config, name, split)
    except (RuntimeError, OSError, ValueError) as error:
        hint = "" if config.download else " Set data.root to its folder, or data.download=true."
        raise DataError(f"cannot open {config.dataset} ({split}) in {config.root}: {error}{hint}") from error
    return TorchvisionImages(
        dataset, f"{config.dataset}/{split}", check_num_classes(config, config.dataset, _found(name, dataset))
    )


def _build(config: DataConfig, name: str, split: str) -> Any:
    if name in _TIMM:
        return create_dataset(f"torch/{name}", root=config.root, split=split, download=config.download)
    kind, training, validation = _MORE[name]
    split = training if split in TRAIN_NAMES else validation if split in VALIDATION_NAMES else split
    return getattr(torchvision.datasets, kind)(config.root, split=split, download=config.download)


def _found(name: str, dataset: Any) -> int | None:
    for attribute in ("classes", "all_categories"):
        if names := getattr(dataset, attribute, None):
            return len(names)
    return _CLASSES.get(name)
