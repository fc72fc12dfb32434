"""torchvision's classification sets: those of timm's factory, those with a `split`, and those without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitruvius._checks import as_label
from vitruvius._errors import DataError, suggest
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data.base import (
    TRAIN_NAMES,
    VALIDATION_NAMES,
    Size,
    check_num_classes,
    data_source,
    smallest_of_each_class,
)
from vitruvius.data.classes import class_names, names_by_number, read_class_map, require_classes


@dataclass(frozen=True)
class Known:
    """How one set of torchvision is opened."""

    kind: str | None = None  # class of torchvision.datasets; None: timm's factory opens it
    train: str = "train"  # its words for the splits
    validation: str = "test"
    two_splits: bool = False  # training or test
    training: float | None = None  # of a set without splits: images of a class that train, or a share of them
    classes: int | None = None  # where it does not name them
    first_label: int = 0


SETS = {
    **dict.fromkeys(("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist"), Known(two_splits=True)),
    **dict.fromkeys(("inaturalist", "places365", "imagenet"), Known()),
    "svhn": Known("SVHN", classes=10),
    "clevr": Known("CLEVRClassification", validation="val", classes=8, first_label=3),  # 3 to 10 objects in an image
    "flowers102": Known("Flowers102", validation="val", classes=102),
    "food101": Known("Food101"),
    "stl10": Known("STL10", classes=10),
    "oxford_iiit_pet": Known("OxfordIIITPet", train="trainval"),
    "dtd": Known("DTD", validation="val"),
    "gtsrb": Known("GTSRB", classes=43),
    "country211": Known("Country211", validation="valid"),
    "fgvc_aircraft": Known("FGVCAircraft", validation="val"),
    "imagenette": Known("Imagenette", validation="val"),
    "lfw_people": Known("LFWPeople"),
    "pcam": Known("PCAM", validation="val", classes=2),
    "rendered_sst2": Known("RenderedSST2", validation="val"),
    "stanford_cars": Known("StanfordCars"),
    "caltech101": Known("Caltech101", two_splits=True, training=30),
    "caltech256": Known("Caltech256", two_splits=True, training=30),
    "sun397": Known("SUN397", two_splits=True, training=50),
    "eurosat": Known("EuroSAT", two_splits=True, training=0.8),
    "lsun": Known("LSUN", validation="val"),
}


class TorchvisionImages:
    """A torchvision data set by number: all its images, or the `rows`.

    `name` is what errors and reports call it; `numbers` maps the labels of the data set to those given out, of which
    there are `num_classes` (default: as they are).
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        num_classes: int,
        rows: Sequence[int] | None = None,
        numbers: dict[int, int] | None = None,
    ) -> None:
        self.dataset, self.name, self.num_classes, self.numbers = dataset, name, num_classes, numbers
        self.rows = range(len(dataset)) if rows is None else rows

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
        """The image and its label, by its number among those chosen."""
        image, label = self.dataset[self.rows[index]]
        label = as_label(label)
        return image, label if self.numbers is None else self.numbers[label]

    @property
    def labels(self) -> Any:
        """(n,) as the data set numbers them; None where it does not say without reading the images."""
        labels = np.asarray(_labels(self.dataset))
        return labels[list(self.rows)] if labels.ndim == 1 and labels.dtype.kind in "iu" else None

    @property
    def pixels(self) -> Any:
        """(n, …) where the data set holds all its images as one array and all are used; else None."""
        held = getattr(self.dataset, "data", None)
        return held if isinstance(held, np.ndarray | torch.Tensor) and len(self.rows) == len(held) else None

    def describe(self, index: int) -> str:
        return f"image {self.rows[index]} of {self.name}"


@data_source("torch", after_slash="<name>", root="the folder of the data set", class_names=True, class_map=True)
def open_torchvision(config: DataConfig, split: str, size: Size) -> TorchvisionImages:
    """A data set of torchvision, e.g. torch/cifar10, from the folder `root`; downloaded only if asked.

    `split` is train or validation, or the data set's own word.
    """
    name = config.dataset.removeprefix("torch/").lower()
    if name not in SETS:
        raise DataError(f"no torchvision data set {name!r}{suggest(name, SETS)} Known: {', '.join(sorted(SETS))}.")
    known = SETS[name]
    if known.two_splits and split not in (*TRAIN_NAMES, *VALIDATION_NAMES, "test"):
        raise DataError(f"{config.dataset} has no split {split!r}; choose train or test.")
    try:
        dataset = _open(config, name, known, split)
    except (RuntimeError, OSError, ValueError) as error:
        advice = "" if config.download else " Set data.root to its folder, or data.download=true."
        raise DataError(f"cannot open {config.dataset} ({split}) in {config.root}: {error}{advice}") from error
    rows = None
    if known.training is not None:
        training = smallest_of_each_class(torch.tensor(_labels(dataset)), known.training)  # it has no splits
        rows = (training if split in TRAIN_NAMES else ~training).nonzero()[:, 0].tolist()
    place, names = f"{config.dataset}/{split}", _class_names(dataset)
    if config.class_map is not None:  # e.g. caltech-102 for a model that knows TensorFlow's numbering
        if not names:
            raise DataError(f"{config.dataset} does not name its classes, so data.class_map cannot renumber them.")
        order = read_class_map(config.class_map, Path(str(config.root)))
        require_classes(names, list(order), f"data.class_map={config.class_map}")
        renumbered = {label: order[name] for label, name in enumerate(names)}
        return TorchvisionImages(dataset, place, len(order), rows, renumbered)
    if config.classes is not None:
        wanted, labels = class_names(config.classes), _labels(dataset)
        if not names or labels is None:
            raise DataError(f"data.classes: torchvision does not say which classes the images of {place} have.")
        require_classes(wanted, names, place)
        numbers = {names.index(name): number for number, name in enumerate(wanted)}
        chosen = [row for row in (range(len(dataset)) if rows is None else rows) if int(labels[row]) in numbers]
        return TorchvisionImages(dataset, place, check_num_classes(config, place, len(wanted)), chosen, numbers)
    found = _inaturalist_classes(dataset) if name == "inaturalist" else len(names) or known.classes
    shifted = {known.first_label + number: number for number in range(known.classes or 0)}
    classes = check_num_classes(config, config.dataset, found)
    return TorchvisionImages(dataset, place, classes, rows, shifted if known.first_label else None)


def _open(config: DataConfig, name: str, known: Known, split: str) -> Any:
    import torchvision.datasets
    from timm.data import create_dataset

    if known.kind is None:
        dataset = create_dataset(f"torch/{name}", root=config.root, split=split, download=config.download)
        if name == "inaturalist":
            dataset.index.sort()  # torchvision lists files in the order of the disk; ids should not depend on it
        return dataset
    kind = getattr(torchvision.datasets, known.kind)
    if known.training is not None:
        return kind(config.root, download=config.download)
    own = {**dict.fromkeys(TRAIN_NAMES, known.train), **dict.fromkeys(VALIDATION_NAMES, known.validation)}
    if name != "lsun":
        return kind(config.root, split=own.get(split, split), download=config.download)
    require("lmdb", "lsun")
    if split not in (*own, "test"):
        raise ValueError(f"there is no split {split!r}; choose train, validation or test.")
    if config.download:
        raise ValueError("torchvision cannot download LSUN; fetch its LMDB files by hand and unset data.download.")
    return kind(config.root, classes=own.get(split, split))  # ten scenes, one LMDB file each


def _inaturalist_classes(dataset: Any) -> int:
    if len(dataset.target_type) != 1:
        raise DataError(f"torch/inaturalist: one label per image, not {', '.join(dataset.target_type)}.")
    (rank,) = dataset.target_type
    return len(dataset.all_categories if rank == "full" else dataset.categories_index[rank])


def _class_names(dataset: Any) -> list[str]:
    """ImageNet's classes by WordNet id, others by their names."""
    for attribute in ("wnids", "classes", "categories", "all_categories", "class_to_idx"):
        if names := getattr(dataset, attribute, None):
            return list(names)
    return []


def _labels(dataset: Any) -> Any:
    """The labels of all images, under whichever name a class of torchvision keeps them; None if it does not."""
    for name in ("targets", "labels", "_labels", "y"):
        if hasattr(dataset, name):
            return getattr(dataset, name)
    return None
