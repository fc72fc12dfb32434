"""Images in folders, one folder per class, through timm's reader; splits and classes are never guessed wrongly."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from timm.data import create_dataset
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from vitruvius._errors import DataError
from vitruvius._files import read_json
from vitruvius.data._config import DataConfig
from vitruvius.data._subsets import class_names, read_class_map, require_classes
from vitruvius.data.sources._base import (
    TRAIN_NAMES,
    VALIDATION_NAMES,
    Size,
    check_num_classes,
    data_source,
    existing_folder,
)
from vitruvius.data.sources.hugging_face import FileImages

EXAMPLES = "examples.json"  # names all classes of a folder that `vitruvius attack` has drawn, also empty ones


@data_source("folder", class_names=True, wordnet=True)
def open_folder(config: DataConfig, split: str, size: Size) -> FileImages:
    """Images `root/<split>/<class>/*.jpg`; the classes are those of the training folder, so labels agree.

    A class map, or `data.classes`, chooses and numbers the classes instead; folders that it does not name are left out.

    `config` is the data section, `split` the folder's name below its root or a synonym of it, `size` what the model
    takes, which is left to the transform.
    """
    root = existing_folder(config.root)
    folder = split_folder(root, split)
    classes = _classes(config, root, folder)
    found = leaf_classes(folder)
    unknown = [name for name in found if name not in classes]
    if config.classes is not None:
        require_classes(classes, found, str(folder))
    elif unknown and config.class_map is None:
        raise DataError(f"{folder} has classes that the training folder lacks: {', '.join(unknown[:5])}.")
    if len(unknown) == len(found):
        raise DataError(f"the class map {config.class_map} names none of the folders in {folder}.")
    dataset = create_dataset("folder", root=str(folder), search_split=False, class_map=classes)
    return FileImages(dataset, f"folder/{split}", check_num_classes(config, str(folder), len(set(classes.values()))))


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split: its name or a synonym; `.` is the root itself.

    `root` is that of the data set, `split` the name, such as val or validation.
    """
    synonyms = next((names for names in (TRAIN_NAMES, VALIDATION_NAMES) if split in names), ())
    for name in (split, *synonyms):
        if (root / name).is_dir():
            return root / name
    tried = ", ".join(dict.fromkeys((split, *synonyms)))
    raise DataError(
        f"no folder for the split {split!r} in {root} (tried {tried}). If the folders of the classes lie directly "
        "in the root, write '.' as the name of the split."
    )


def leaf_classes(folder: Path) -> list[str]:
    """Names of the folders that hold images, in natural order; an error if there are none or images outside.

    `folder` is that of a split.
    """
    names: set[str] = set()
    _collect(folder, names, depth=0)
    if not names:
        raise DataError(f"no images in {folder}; expected one subfolder per class with jpg, png or webp files inside.")
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
    extensions = get_img_extensions(as_set=True)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                _collect(Path(entry.path), names, depth + 1)
            elif Path(entry.name).suffix.lower() in extensions:
                names.add(folder.name if depth else "")
                if depth:
                    return
