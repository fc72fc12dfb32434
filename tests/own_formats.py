"""Tiny data in the formats that packaged recipes name: folders, archives, torchvision's files, a stream of timm's."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from PIL import Image
from torch.utils.data import get_worker_info

from shift_layouts import write_pictures
from vitruvius._imagenet import imagenet_classes
from vitruvius.data.classes import LISTS, class_names
from vitruvius.data.sources import streams

CALTECH = 102  # classes of TensorFlow's set


def picture(number: int) -> Image.Image:
    """8 × 8 pixels, different for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Reader:
    """What timm's readers of streams have in common; deals out samples to processes and workers."""

    def __init__(self, number: int, batch_size: int = 4, training: bool = False, lost: tuple[int, ...] = ()) -> None:
        self.num_samples, self.batch_size, self.training, self.lost = number, batch_size, training, lost
        self.dist_rank, self.dist_num_replicas, self.num_workers = 5, 7, 1  # as if another group were running
        self.ds, self.epoch = None, 0
        self.class_to_idx: dict[str, int] = {}

    def set_loader_cfg(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _per_worker(self) -> int:
        share = math.ceil(self.num_samples / (self.num_workers * self.dist_num_replicas))
        return math.ceil(share / self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        worker = get_worker_info()
        first = self.dist_rank * self.num_workers + (worker.id if worker else 0)
        mine = range(first, self.num_samples, self.num_workers * self.dist_num_replicas)
        order: Any = np.random.default_rng(self.epoch).permutation(mine) if self.training else mine
        count = self._per_worker() if self.training else len(mine)
        for i in range(count):
            number = int(order[i % len(order)])
            if number not in self.lost:
                yield picture(number), number % 3

    def __len__(self) -> int:
        return self._per_worker() * self.num_workers


def read_tensorflow(patch: pytest.MonkeyPatch) -> list[str]:
    """Have `tfds/…` read by `Reader`, since TensorFlow is large; returns the splits that are asked for."""
    asked: list[str] = []

    def create(name: str, *, split: str, is_training: bool, batch_size: int, **settings: Any) -> Any:
        assert settings["num_samples"] is None  # which timm hands on to a reader that does not take it
        asked.append(split)
        limit = re.fullmatch(r"(?:train|test)(?:\[:(\d+)\])?", split)
        assert limit, split
        reader = Reader(int(limit[1] or 8), batch_size, is_training)
        reader.class_to_idx = {f"class {number}": number for number in range(CALTECH)}
        return SimpleNamespace(reader=reader)

    patch.setattr("timm.data.create_dataset", create)
    patch.setattr(streams, "require", lambda package, extra: None)
    return asked


def write_data(dataset: str, root: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """A few images in the format of a data set; returns the settings that name them."""
    if dataset == "digits":
        return []
    if dataset.startswith("tfds/"):
        read_tensorflow(patch)
    elif dataset == "folder":
        classes = {*class_names(next(iter(LISTS))), *imagenet_classes()[:2]}
        for split in ("train", "val"):
            write_pictures(root / split, sorted(classes), size=32)
    elif dataset == "npz":
        return [f"data.root={_write_archive(root / 'images.npz')}"]
    else:
        TORCHVISION[dataset.removeprefix("torch/")](root, patch)
    return [f"data.root={root}"]


def _write_archive(path: Path) -> Path:
    pixels, labels = np.zeros((8, 32, 32, 3), np.uint8), np.arange(8) % 10
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    return path


def _cifar10(root: Path, patch: pytest.MonkeyPatch) -> None:
    _write_cifar(root / "cifar-10-batches-py", patch, ("data_batch_1", "test_batch"), "batches.meta", "label", 10)
    patch.setattr(torchvision.datasets.CIFAR10, "train_list", [["data_batch_1", ""]])


def _cifar100(root: Path, patch: pytest.MonkeyPatch) -> None:
    _write_cifar(root / "cifar-100-python", patch, ("train", "test"), "meta", "fine_label", 100)


def _write_cifar(
    folder: Path, patch: pytest.MonkeyPatch, files: tuple[str, str], meta: str, key: str, classes: int
) -> None:
    folder.mkdir(parents=True)
    patch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda _: True)
    patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for name in files:
        pixels = np.random.default_rng(0).integers(0, 256, (8, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, f"{key}s": list(range(8))}))
    (folder / meta).write_bytes(pickle.dumps({f"{key}_names": [f"class {number}" for number in range(classes)]}))


def _svhn(root: Path, patch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    patch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)
    patch.setattr("torchvision.datasets.svhn.check_md5", lambda *_: True, raising=False)
    for split in ("train", "test"):
        savemat(root / f"{split}_32x32.mat", {"X": np.zeros((32, 32, 3, 8), np.uint8), "y": np.arange(1, 9)[:, None]})


def _flowers102(root: Path, patch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    base = root / "flowers-102"
    (base / "jpg").mkdir(parents=True)
    for number in range(1, 25):
        picture(number).save(base / "jpg" / f"image_{number:05d}.jpg")
    savemat(base / "imagelabels.mat", {"labels": np.arange(1, 25)[None]})
    parts = {"trnid": range(1, 9), "valid": range(9, 17), "tstid": range(17, 25)}
    savemat(base / "setid.mat", {name: np.array([numbers]) for name, numbers in parts.items()})
    patch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)


def _caltech101(root: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("BACKGROUND_Google", "crab", "wrench"):
        folder = root / "caltech101" / "101_ObjectCategories" / name
        folder.mkdir(parents=True)
        for number in range(1, 9):
            picture(number).save(folder / f"image_{number:04d}.jpg")
    (root / "caltech101" / "Annotations").mkdir()


TORCHVISION = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "flowers102": _flowers102,
    "caltech101": _caltech101,
}
