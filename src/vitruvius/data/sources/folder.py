"""Images in folders, one folder per class, through timm's reader; splits and classes are never guessed wrongly."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from vitruvius._checks import as_label
from vitruvius._errors import DataError
from vitruvius._files import read_json
from vitruvius._format import natural_key
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, check_num_classes, data_source, split_folder
from vitruvius.data.classes import class_names, names_by_number, read_class_map, require_classes

EXAMPLES = "examples.json"  # names all classes of a folder that `vitruvius attack` has drawn, also empty ones


class FileImages:
    """Images of one of timm's random-access readers: folders and Hugging Face data sets."""

    def __init__(self, dataset: Any, name: str, num_classes: int) -> None:
        self.reader, self.name, self.num_classes = dataset.reader, name, num_classes
        samples = getattr(self.reader, "samples", None)
        self.samples: list[tuple[str, int]] | None = samples if isinstance(samples, list) else None

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers; empty where the reader has no names."""
        return names_by_number(getattr(self.reader, "class_to_idx", None) or {})

    @property
    def paths(self) -> list[str] | None:
        """The file of every image, where each has one."""
        return None if self.samples is None else [path for path, _ in self.samples]

    @property
    def labels(self) -> list[int] | None:
        """Where they are known without reading the images."""
        return None if self.samples is None else [label for _, label in self.samples]

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self._open(index)
        with file:
            image = Image.open(file)
            image.load()
        return image, as_label(label)

    def read_bytes(self, index: int) -> tuple[bytes, int]:
        """The file of an image as it is, and its label."""
        file, label = self._open(index)
        with file:
            return file.read(), as_label(label)

    def _open(self, index: int) -> tuple[Any, Any]:
        if self.samples is not None and not os.path.isfile(self.samples[index][0]):  # noqa: PTH113 (many)
            raise OSError("it is no file, but a pipe, a folder or a link that leads nowhere")
        return self.reader[index]

    def describe(self, index: int) -> str:
        return self.reader.filename(index, absolute=True) or f"image {index} of {self.name}"


@data_source("folder", root="the folder that holds the images", class_names=True, wordnet=True, files=True)
def open_folder(config: DataConfig, split: str, size: Size) -> FileImages:
    """Images `root/<split>/<class>/*.jpg`; the classes are those of the training folder, so labels agree.

    A class map, or `data.classes`, chooses and numbers the classes instead; folders that it does not name are left out.
    """
    root = Path(config.root or ".").expanduser()
    folder = split_folder(root, split)
    classes = _classes(config, root, folder)
    present = leaf_classes(folder)
    unknown = [name for name in present if name not in classes]
    if config.classes is not None:
        require_classes(classes, present, str(folder))
    elif unknown and config.class_map is None:
        raise DataError(f"{folder} has classes that the training folder lacks: {', '.join(unknown[:5])}.")
    if len(unknown) == len(present):
        raise DataError(f"the class map {config.class_map} names none of the folders in {folder}.")
    from timm.data import create_dataset

    dataset = create_dataset("folder", root=str(folder), search_split=False, class_map=classes)
    return FileImages(dataset, f"folder/{split}", check_num_classes(config, str(folder), len(set(classes.values()))))


def leaf_classes(folder: Path) -> list[str]:
    """Names of the folders that hold images, in natural order; an error if there are none or images outside."""
    names: set[str] = set()
    _collect(folder, names, depth=0)
    if not names:
        raise DataError(f"no images in {folder}; expected one subfolder per class with jpg or png files inside.")
    if names == {""}:
        raise DataError(f"the images in {folder} lie in no class; put them into one subfolder per class.")
    return sorted(names - {""}, key=natural_key)


def _classes(config: DataConfig, root: Path, folder: Path) -> dict[str, int]:
    if config.classes is not None:
        return _numbered(class_names(config.classes))
    if config.class_map is not None:
        return read_class_map(config.class_map, root)
    if (root / EXAMPLES).is_file():
        return _numbered(map(str, read_json(root / EXAMPLES).get("classes") or ()))
    try:
        source = split_folder(root, config.train_split)
    except DataError:
        source = folder  # evaluation data alone
    return _numbered(leaf_classes(source))


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _collect(folder: Path, names: set[str], depth: int) -> None:
    """Look into every folder, but below the top only until its first image: large sets are listed once, not twice."""
    from timm.data.readers.img_extensions import get_img_extensions

    extensions = get_img_extensions(as_set=True)
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_folder(entry):
                _collect(Path(entry.path), names, depth + 1)
            elif Path(entry.name).suffix.lower() in extensions:
                names.add(folder.name if depth else "")
                if depth:
                    return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
