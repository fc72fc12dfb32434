"""torchvision's classification sets: those of timm's factory, those with a `split`, and those without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.datasets
from PIL import Image
from timm.data import create_dataset

from vitruvius._checks import as_label
from vitruvius._errors import DataError, suggest
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data._image_seeds import image_keys
from vitruvius.data._subsets import class_names, names_by_number, read_class_map, require_classes
from vitruvius.data.sources._base import TRAIN_NAMES, VALIDATION_NAMES, Size, check_num_classes, data_source

_TIMM = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "inaturalist", "places365", "imagenet")
_TWO_SPLITS = _TIMM[:6]  # training or test
_MORE = {  # name: (class, training split, validation split)
    "svhn": ("SVHN", "train", "test"),
    "clevr": ("CLEVRClassification", "train", "val"),
    "flowers102": ("Flowers102", "train", "val"),
    "food101": ("Food101", "train", "test"),
    "stl10": ("STL10", "train", "test"),
    "oxford_iiit_pet": ("OxfordIIITPet", "trainval", "test"),
    "dtd": ("DTD", "train", "val"),
    "gtsrb": ("GTSRB", "train", "test"),
    "country211": ("Country211", "train", "valid"),
    "fgvc_aircraft": ("FGVCAircraft", "train", "val"),
    "imagenette": ("Imagenette", "train", "val"),
    "lfw_people": ("LFWPeople", "train", "test"),
    "pcam": ("PCAM", "train", "val"),
    "rendered_sst2": ("RenderedSST2", "train", "val"),
    "stanford_cars": ("StanfordCars", "train", "test"),
}
_UNSPLIT = {"caltech101": "Caltech101", "caltech256": "Caltech256", "eurosat": "EuroSAT", "sun397": "SUN397"}
_SCENES = "lsun"  # its argument is called classes, and it cannot be downloaded
_FEWEST, _MOST = 3, 10  # objects in an image of CLEVR; their number is its class
_CLASSES = {"clevr": _MOST - _FEWEST + 1, "svhn": 10, "stl10": 10, "flowers102": 102, "gtsrb": 43, "pcam": 2}
_NAMES = (*_UNSPLIT, *_TIMM, *_MORE, _SCENES)
_TRAINING: dict[str, float] = {"caltech101": 30, "caltech256": 30, "sun397": 50}  # images of a class, as is usual
_TRAINING |= {"eurosat": 0.8}  # a share of them; all others are for validation


class TorchvisionImages:
    """A torchvision data set by number: all its images, or the `rows`; labels may be renumbered.

    `dataset` is torchvision's; `name` what errors and reports call it; `num_classes` of the labels given out; `numbers`
    maps the labels of the data set to those given out (default: as they are).
    """

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

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers; empty where torchvision does not name them."""
        numbers = {name: label for label, name in enumerate(_class_names(self.dataset))}
        if self.numbers is not None:
            numbers = {name: self.numbers[label] for name, label in numbers.items() if label in self.numbers}
        return names_by_number(numbers)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The image and its label, by its `index` among those chosen, from 0."""
        image, label = self.dataset[self.rows[index]]
        if self.numbers is not None:
            return image, self.numbers[as_label(label)]
        return image, as_label(label)

    @property
    def labels(self) -> Any:
        """(n,) as the data set numbers them; None where it does not say without reading the images."""
        known = np.asarray(_labels(self.dataset))
        if known.ndim != 1 or known.dtype.kind not in "iu":
            return None
        return known[list(self.rows)]

    @property
    def pixels(self) -> Any:
        """(n, …) where the data set holds all its images as one array and all are used; else None."""
        held = getattr(self.dataset, "data", None)
        if not isinstance(held, np.ndarray | torch.Tensor) or len(self.rows) != len(held):
            return None
        return held

    def describe(self, index: int) -> str:
        """Which image of the data set has this `index`, for an error."""
        return f"image {self.rows[index]} of {self.name}"


@data_source("torch", after_slash="<name>", class_names=True)
def open_torchvision(config: DataConfig, split: str, size: Size) -> TorchvisionImages:
    """A data set of torchvision, e.g. torch/cifar10, from the folder `root`; downloaded only if asked.

    `config` is the data section; `split` train or validation, or the data set's own word; `size` what the model takes,
    which is left to the transform.
    """
    name = config.dataset.removeprefix("torch/").lower()
    if name not in _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise DataError(f"no torchvision data set {name!r}{suggest(name, _NAMES)} Known: {known}.")
    if config.root is None:
        raise DataError(f"data.root is not set; it must name the folder of {config.dataset}.")
    if name in (*_TWO_SPLITS, *_UNSPLIT) and split not in (*TRAIN_NAMES, *VALIDATION_NAMES, "test"):
        raise DataError(f"{config.dataset} has no split {split!r}; choose train or test.")
    dataset = _opened(config, name, split)
    rows = None
    if name in _UNSPLIT:
        rows = _split_rows(dataset, _TRAINING[name], training=split in TRAIN_NAMES)
    place = f"{config.dataset}/{split}"
    if config.class_map is not None:
        return _mapped(dataset, place, config, rows)
    if config.classes is not None:
        return _chosen(dataset, place, config, rows)
    numbers = None
    if name == "clevr":
        numbers = {count: count - _FEWEST for count in range(_FEWEST, _MOST + 1)}
    classes = check_num_classes(config, config.dataset, _found(name, dataset))
    return TorchvisionImages(dataset, place, classes, rows, numbers)


def _opened(config: DataConfig, name: str, split: str) -> Any:
    """torchvision's data set, or an error that says where it was looked for."""
    try:
        return _build(config, name, split)
    except (RuntimeError, OSError, ValueError) as error:
        said = f"cannot open {config.dataset} ({split}) in {config.root}: {error}"
        if not config.download:
            said += " Set data.root to its folder, or data.download=true."
        raise DataError(said) from error


def _mapped(dataset: Any, place: str, config: DataConfig, rows: Sequence[int] | None) -> TorchvisionImages:
    """Labels renumbered by a class map, e.g. caltech-102 for a model that knows TensorFlow's numbering."""
    names = _class_names(dataset)
    if not names:
        raise DataError(f"{config.dataset} does not name its classes, so data.class_map cannot renumber them.")
    numbers = read_class_map(str(config.class_map), Path(config.root or "."))
    require_classes(names, list(numbers), f"data.class_map={config.class_map}")
    renumbered = {label: numbers[name] for label, name in enumerate(names)}
    return TorchvisionImages(dataset, place, len(numbers), rows, renumbered)


def _build(config: DataConfig, name: str, split: str) -> Any:
    if name in _UNSPLIT:
        return getattr(torchvision.datasets, _UNSPLIT[name])(config.root, download=config.download)
    if name == _SCENES:
        return _open_scenes(config, split)
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


def _open_scenes(config: DataConfig, split: str) -> Any:
    """LSUN: ten scenes, one LMDB file each, for training or validation."""
    require("lmdb", "lsun")
    words = {**dict.fromkeys(TRAIN_NAMES, "train"), **dict.fromkeys(VALIDATION_NAMES, "val"), "test": "test"}
    if split not in words:
        raise ValueError(f"there is no split {split!r}; choose train, validation or test.")
    if config.download:
        raise ValueError("torchvision cannot download LSUN; fetch its LMDB files by hand and unset data.download.")
    return torchvision.datasets.LSUN(config.root, classes=words[split])


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
    for attribute in ("wnids", "classes", "categories", "all_categories", "class_to_idx"):
        if names := getattr(dataset, attribute, None):
            return list(names)
    return []


def _split_rows(dataset: Any, wanted: float, *, training: bool) -> list[int]:
    """Some sets come without splits: the images of a class with the smallest hashed numbers train, for ever."""
    labels = torch.tensor(_labels(dataset))
    rank = image_keys(torch.arange(len(labels)), torch.zeros_like(labels), seed=0, epoch=0)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        count = round(wanted * len(members)) if wanted < 1 else round(wanted)
        chosen[members[rank[members].argsort()[:count]]] = True
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
