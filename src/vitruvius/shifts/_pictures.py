"""Pictures in folders, one folder per class; what belongs to no class is left out and named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image

from vitruvius._errors import DataError
from vitruvius._imagenet import NUM_CLASSES, imagenet_labels, subset_columns
from vitruvius.shifts._base import Shift, Subset
from vitruvius.shifts._remarks import Remark, some, subfolders

UNKNOWN = "left out, not a class of it"
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")


class Pictures:
    """The pictures of the classes `labels` below a folder, in order of class and name.

    `folder` is above the classes; `name` is what errors and reports call them.
    """

    def __init__(self, folder: Path, labels: Mapping[str, int], *, name: str) -> None:
        known = known_classes(folder, labels, name=name)
        self.name, self.folder = name, folder
        self.num_classes = len(set(labels.values()))
        self._strange: list[str] = []
        self.files = [(f"{one}/{file}", labels[one]) for one in known for file in self._pictures(one)]
        if not self.files:
            raise DataError(
                f"the {len(known)} class folders in {folder} hold no pictures ({', '.join(EXTENSIONS)}), but "
                f"{some(self._strange) or 'nothing'}. Unpack {name} again, or take the folder away."
            )
        self.keys = torch.tensor([_key(file) for file, _ in self.files])
        self.remarks = self._remarks(labels)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its label, by its `index` from 0."""
        file, label = self.files[index]
        with Image.open(self.folder / file) as image:
            image.load()
        return image, label

    def describe(self, index: int) -> str:
        """The file of this `index`, for messages."""
        return str(self.folder / self.files[index][0])

    def _pictures(self, one: str) -> Iterator[str]:
        for file in sorted(entry.name for entry in os.scandir(self.folder / one)):
            if file.lower().endswith(EXTENSIONS):
                yield file
            else:
                self._strange.append(f"{one}/{file}")

    def _remarks(self, labels: Mapping[str, int]) -> list[Remark]:
        remarks = []
        for what, names in self._left_out(labels).items():
            if names:
                remarks.append(Remark(place=self.name, what=what, names=tuple(names)))
        present = {label for _, label in self.files}
        absent = [one for one, label in labels.items() if label not in present]
        if absent:
            what = f"of {self.num_classes} classes have no pictures"
            number = self.num_classes - len(present)
            remarks.append(Remark(place=self.name, what=what, names=tuple(absent), number=number))
        return remarks

    def _left_out(self, labels: Mapping[str, int]) -> dict[str, list[str]]:
        """Why something is left out → what."""
        files = sorted(path.name for path in self.folder.iterdir())
        return {
            UNKNOWN: [one for one in subfolders(self.folder) if one not in labels],
            "left out, in no class folder": [file for file in files if file.lower().endswith(EXTENSIONS)],
            "left out, not pictures": self._strange,
        }


def natural_shift(root: Path, *, name: str, archive: Sequence[str], subset: str = "") -> Shift:
    """A shift with one subset: pictures in one folder per class, of all ImageNet classes or of some.

    root: the folder that the user names.
    name: of the shift, for reports.
    archive: folders that its archive unpacks to; the first that lies in `root` is read, else `root` itself.
    subset: a, o or r: only the classes of ImageNet-A, -O or -R; default all 1,000.
    """
    part = pictures_subset(unpacked(root, archive), imagenet_labels(subset), name=name)
    columns = subset_columns(subset) if subset else None
    return Shift(name=name, parts=(part,), num_classes=NUM_CLASSES, columns=columns)


def pictures_subset(folder: Path, labels: Mapping[str, int], *, name: str, outside: bool = False) -> Subset:
    """A folder of class folders, looked into now and listed when its turn comes."""
    known_classes(folder, labels, name=name)
    return Subset(name=name, group=name, outside=outside, open=lambda: Pictures(folder, labels, name=name))


def unpacked(root: Path, archive: Sequence[str]) -> Path:
    """The folder inside `root` that an archive has made, by any of its names; else `root` itself."""
    for name in archive:
        if (root / name).is_dir():
            return root / name
    return root


def known_classes(folder: Path, labels: Mapping[str, int], *, name: str) -> list[str]:
    """The class folders in a folder, in order of their labels; that there is none is an error."""
    found = subfolders(folder)
    known = sorted((one for one in found if one in labels), key=lambda one: (labels[one], one))
    if not known:
        raise DataError(
            f"{folder} has no folder of a class of {name}; expected e.g. {next(iter(labels))}, "
            f"found {some(found) or 'no folders'}. Rename them, or give the folder that holds such classes."
        )
    return known


def _key(file: str) -> int:
    """A number that belongs to a class and file name: the same wherever the folder lies and whatever lies beside."""
    return int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest(), "little", signed=True)
