"""How published sets lie on disk: class folders, those below corruptions and severities, arrays of five severities."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius._random import id_of
from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C, SEVERITIES, corruption_names
from vitruvius.data import TensorSet
from vitruvius.shifts.base import Remark, Shift, Subset, shortened

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
ARCHIVES = ("noise", "blur", "weather", "digital", "extra")  # folders that ImageNet-C's archives unpack to
CIFAR_IMAGES = 10_000  # of CIFAR-10-C and CIFAR-100-C at each severity


class Pictures:
    """The pictures of the classes `labels` below a folder, one folder per class, in order of class and name.

    folder: above the classes.
    labels: name of a class folder → number of the class.
    name: what errors and reports call the images.
    ignored: class folders that may lie beside those; others are left out and named.
    """

    def __init__(self, folder: Path, labels: Mapping[str, int], *, name: str, ignored: Collection[str] = ()) -> None:
        self.name, self.folder = name, folder
        self.num_classes = len(set(labels.values()))
        self.files: list[tuple[str, int]] = []  # `class/file` and label
        strange: list[str] = []
        for one in class_folders(folder, labels, name=name):
            for file in names_in(folder / one):
                if file.lower().endswith(EXTENSIONS):
                    self.files.append((f"{one}/{file}", labels[one]))
                else:
                    strange.append(f"{one}/{file}")
        if not self.files:
            raise DataError(
                f"the class folders in {folder} hold no pictures ({', '.join(EXTENSIONS)}), but "
                f"{shortened(strange) or 'nothing'}. Unpack {name} again, or take the folder away."
            )
        self.keys = torch.tensor([id_of(file) for file, _ in self.files])
        present = {label for _, label in self.files}
        remarkable = {
            "left out, not a class of it": [n for n in subfolders(folder) if n not in labels and n not in ignored],
            "left out, in no class folder": [n for n in names_in(folder) if n.lower().endswith(EXTENSIONS)],
            "left out, not pictures": strange,
            "classes without pictures": [one for one, label in labels.items() if label not in present],
        }
        self.remarks = [Remark(name, what, tuple(names)) for what, names in remarkable.items() if names]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        with Image.open(self.folder / file) as image:
            image.load()
        return image, label

    def describe(self, index: int) -> str:
        """The image's file, for messages."""
        return str(self.folder / self.files[index][0])

    @property
    def paths(self) -> list[str]:
        """The file of every image."""
        return [str(self.folder / file) for file, _ in self.files]

    @property
    def labels(self) -> list[int]:
        """The class of every image."""
        return [label for _, label in self.files]


def pictures(
    folder: Path,
    labels: Mapping[str, int],
    *,
    name: str,
    group: str,
    severity: int | None = None,
    outside: bool = False,
    ignored: Collection[str] = (),
) -> Subset:
    """A subset of class folders: that there are some is checked now, pictures are listed when its turn comes."""
    class_folders(folder, labels, name=name)
    return Subset(
        name=group if severity is None else f"{group} {severity}",
        group=group,
        severity=severity,
        outside=outside,
        open=functools.partial(Pictures, folder, labels, name=name, ignored=ignored),
    )


def class_folders(folder: Path, labels: Mapping[str, int], *, name: str) -> list[str]:
    """The class folders in a folder, in order of their labels; that there is none is an error."""
    present = subfolders(folder)
    classes = sorted((one for one in present if one in labels), key=lambda one: (labels[one], one))
    if not classes:
        raise DataError(
            f"{folder} has no folder of a class of {name}; expected e.g. {next(iter(labels))}, "
            f"found {shortened(present) or 'no folders'}. Rename them, or give the folder that holds such classes."
        )
    return classes


def corrupted_pictures(
    root: Path, name: str, corruptions: Sequence[str], labels: Mapping[str, int], *, classes: Sequence[str] = ()
) -> Shift:
    """Class folders below corruptions and severities, as ImageNet-C is published, also inside those of its archives.

    Every folder is looked into before any is used; an empty one is missing. `classes` are told to the user where the
    folders alone say what they are.
    """
    folders = {one: folder for one in corruptions if (folder := corruption_folder(root, one)) is not None}
    if not folders:
        raise DataError(
            f"{root} has no corruption of {name}; expected folders such as {corruptions[0]}/1/<class>, "
            f"found {listed(root)}. Name the folder that holds them."
        )
    parts: list[Subset] = []
    missing: list[str] = []
    for one in corruptions:
        present = [s for s in SEVERITIES if one in folders and subfolders(folders[one] / str(s))]
        parts += [
            pictures(folders[one] / str(s), labels, name=f"{name}/{one} {s}", group=one, severity=s) for s in present
        ]
        missing += [f"{one} {s}" for s in SEVERITIES if s not in present] if present else [one]
    if not parts:
        one, folder = folders.popitem()
        raise DataError(
            f"the corruptions in {root} have no severities; expected class folders in {folder / '1'} to "
            f"{folder / '5'}, found {listed(folder)} in {one}. Unpack {name} again, or rename its folders."
        )
    strange = [one for one in subfolders(root) if one not in (*corruptions, *ARCHIVES)]
    inside = [(one, level) for one, folder in folders.items() for level in subfolders(folder)]
    deeper = [f"{one}/{level}" for one, level in inside if level not in map(str, SEVERITIES)]
    remarkable = {"not a corruption of it": strange, "not a severity from 1 to 5": deeper}
    return Shift(
        name=name,
        parts=tuple(parts),
        num_classes=len(labels),
        classes=tuple(classes),
        missing=tuple(missing),
        remarks=tuple(f"{name}: left out, {what}: {shortened(n)}." for what, n in remarkable.items() if n),
    )


def corruption_folder(root: Path, corruption: str) -> Path | None:
    """The folder of a corruption, in `root` or in the folder of one of ImageNet-C's archives."""
    candidates = (root / corruption, *(root / archive / corruption for archive in ARCHIVES))
    return next((path for path in candidates if path.is_dir()), None)


@dataclass(frozen=True, kw_only=True)
class ArrayImages(TensorSet):
    """Images in memory, of one severity of one file."""

    keys: Tensor
    remarks: tuple[Remark, ...] = ()


def arrays(root: Path, name: str, num_classes: int) -> Shift:
    """`<corruption>.npy` (5 n, H, W, C) uint8, severity after severity, and labels.npy (5 n), as in CIFAR-10-C.

    Every file is looked at before any is used.
    """
    labels = _array_labels(root, name, num_classes)
    files = {one: root / f"{one}.npy" for one in corruption_names("all") if (root / f"{one}.npy").is_file()}
    if not files:
        raise DataError(
            f"{root} has none of the files of {name}; expected e.g. fog.npy beside labels.npy, found {listed(root)}. "
            "Name the folder that holds them."
        )
    for file in files.values():
        pixels = _mapped(file)
        if pixels.ndim != 4 or pixels.dtype != np.uint8 or len(pixels) != len(labels) or pixels.shape[-1] not in (1, 3):
            raise DataError(
                f"{file} holds {pixels.dtype} {pixels.shape}; expected uint8 ({len(labels)}, height, width, channels) "
                f"with 1 or 3 channels, an image for each label. Get it again, or take it away."
            )
    images = len(labels) // len(SEVERITIES)
    strange = sorted(file.name for file in root.glob("*.npy") if file.stem not in (*files, "labels"))
    remarks = [f"{name}: left out, not a corruption of it: {', '.join(strange)}."] if strange else []
    if images != CIFAR_IMAGES:
        remarks.append(f"{name}: {images} images per severity; as published there are {CIFAR_IMAGES:,}.")

    def severity_of(one: str, severity: int) -> ArrayImages:
        rows = slice((severity - 1) * images, severity * images)
        return ArrayImages(
            name=f"{name}/{one} {severity}",
            images=torch.from_numpy(np.array(_mapped(files[one])[rows])).movedim(-1, 1),  # (n, C, H, W)
            labels=torch.from_numpy(labels[rows].astype(np.int64)),
            num_classes=num_classes,
            keys=torch.arange(images),
        )

    places = [(one, s) for one in files for s in SEVERITIES]
    return Shift(
        name=name,
        parts=tuple(
            Subset(name=f"{one} {s}", group=one, severity=s, open=functools.partial(severity_of, one, s))
            for one, s in places
        ),
        num_classes=num_classes,
        benchmark=BENCHMARK,
        missing=tuple(one for one in IMAGENET_C if one not in files),
        remarks=tuple(remarks),
    )


def _array_labels(root: Path, name: str, num_classes: int) -> np.ndarray:
    file = root / "labels.npy"
    if not file.is_file():
        raise DataError(
            f"{root} has no labels.npy; the labels of {name} lie beside its files, e.g. fog.npy; found {listed(root)}. "
            "Name the folder that holds them."
        )
    labels = np.array(_mapped(file))
    if labels.ndim != 1 or not len(labels) or len(labels) % len(SEVERITIES):
        raise DataError(
            f"{file} has shape {labels.shape}; expected one label per image, for {len(SEVERITIES)} severities one "
            "after the other, as published (50000,). Get it again."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"{file} holds {labels.dtype} from {labels.min()} to {labels.max()}, labels other than "
            f"0 … {num_classes - 1}. It may belong to another set; get it again."
        )
    return labels


def _mapped(file: Path) -> np.ndarray:
    """The array, mapped and not read."""
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{file} cannot be read ({file.stat().st_size:,} bytes: {error}); it may be truncated, or is not an array. "
            "Get it again, or take it away."
        ) from error
    return array


def unpacked(root: Path, *names: str) -> Path:
    """The folder inside `root` that an archive has made, by any of its names; else `root` itself."""
    return next((root / name for name in names if (root / name).is_dir()), root)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders inside, in order; none where there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def names_in(folder: Path) -> list[str]:
    """Names of what lies inside, in order."""
    return sorted(path.name for path in folder.iterdir())


def listed(folder: Path) -> str:
    """Some of what lies inside: folders if there are any, else files."""
    return shortened(subfolders(folder) or names_in(folder), 5) or "nothing"
