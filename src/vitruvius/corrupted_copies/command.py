"""The verb `corrupt` as a command uses it: choose corruptions, choose images, write the copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitruvius._checks import Progress, check_count
from vitruvius._config import build, override
from vitruvius._errors import ConfigError, DataError
from vitruvius._progress import Bar
from vitruvius.corrupted_copies._work import usual_workers
from vitruvius.corrupted_copies.arrays import Array, copy_arrays
from vitruvius.corrupted_copies.folders import class_files, copy_folder
from vitruvius.corruptions import GROUPS, Corruption, Scale, corruption_names, parse_corruptions
from vitruvius.data import DataConfig, chosen_files, chosen_ids, open_data


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """What the command line says about a copy; text stays text until it is checked."""

    corruptions: str = "benchmark"  # groups and names, with commas
    severities: str = "1,2,3,4,5"
    size: str = "224"  # of a folder: pixels of the middle square, or keep
    format: Literal["jpeg", "png"] = "jpeg"  # of a folder
    seed: int = 0
    scale: Scale = "auto"
    textures: str | None = None  # folder with photographs of frost
    images: int | None = None  # how many; None: all
    workers: int | None = None  # processes; None: one per core


def copy_data(data: str, overrides: Sequence[str], out: str, options: CopyOptions) -> int:
    """Write a corrupted copy of a folder or of a data set by name; returns how many files it has.

    data: a folder with one folder per class, or the name of a data set (`digits`, `torch/cifar10`).
    overrides: `data.key=value` settings of a data set by name; a folder takes none.
    out: the folder to write; one that was begun with the same settings is finished.
    options: corruptions, severities and how the copy is written.
    """
    for count, flag in ((options.images, "--images"), (options.workers, "--workers")):
        if count is not None:
            check_count(count, flag)
    corruptions = chosen_corruptions(options)
    with Bar("corrupting") as progress:
        if Path(data).expanduser().is_dir():
            if overrides:
                raise ConfigError(f"{overrides[0]!r} is for data sets by name; {data} is a folder.")
            return _copy_folder(data, out, corruptions, options, progress)
        return _copy_arrays(data, overrides, out, corruptions, options, progress)


def chosen_corruptions(options: CopyOptions) -> list[Corruption]:
    """The corruptions that the `options` ask for, at each severity, in ImageNet-C's order."""
    made: list[Corruption] = []
    for name in _names(options.corruptions):
        settings: dict[str, Any] = {"name": name, "seed": options.seed, "scale": options.scale}
        if name == "frost" and options.textures:
            settings["textures"] = options.textures
        for severity in options.severities.split(","):
            settings["severity"] = _whole_number(severity, "--severities")
            made += parse_corruptions("corrupt", settings, where="--corruptions")
    return made


def _names(text: str) -> list[str]:
    """Groups and names, each corruption once: known ones in the order of the group `all`, misspelt ones last."""
    asked: set[str] = set()
    for word in text.split(","):
        name = word.strip()
        asked.update(corruption_names(name) if name in GROUPS else (name,))
    known = [name for name in corruption_names("all") if name in asked]
    return [*known, *sorted(asked.difference(known))]


def read_data(name: str, overrides: Sequence[str]) -> tuple[Array, Array, Array]:
    """Images (N, H, W, C) uint8, labels (N,) and ids (N,) of the validation images of a data set.

    `name` is a data set that `vitruvius list data` shows; `overrides` are keys of its section, such as `root=/data`.
    """
    config = _data_config(name, overrides)
    side = config.image_size or 32
    data = open_data(config, config.val_split, (config.in_chans or 3, side, side))
    ids = chosen_ids(data, config.val_num_samples)
    pictures = [data.read(index) for index in ids.tolist()]
    labels = np.array([label for _, label in pictures])
    return _one_array([image for image, _ in pictures], name), labels, ids.numpy()


def _one_array(pictures: Sequence[Image.Image], name: str) -> Array:
    """(N, H, W, C) uint8; pictures of several sizes or kinds are an error."""
    sizes = {(picture.size, picture.mode) for picture in pictures}
    if len(sizes) != 1:
        raise DataError(
            f"{name} has images of {len(sizes)} sizes; a copy in one file needs one. Corrupt it on the fly."
        )
    images = np.stack([np.asarray(picture) for picture in pictures])
    return images.reshape(*images.shape[:3], -1)


def _data_config(name: str, overrides: Sequence[str]) -> DataConfig:
    if Path(name).suffix or name.startswith((".", "/", "~")):
        raise DataError(f"no folder {name}; expected one that holds a folder of images for every class.")
    for setting in overrides:
        if not setting.startswith("data."):
            raise ConfigError(f"{setting!r} says nothing about the data; write data.root=…, data.val_split=….")
    return build(DataConfig, override({"data": {"dataset": name}}, overrides)["data"], source=name)


def _copy_folder(folder: str, out: str, corruptions: list[Corruption], options: CopyOptions, progress: Progress) -> int:
    size = None
    if options.size != "keep":
        size = _whole_number(options.size, "--size")
    return copy_folder(
        folder,
        out,
        corruptions,
        size=size,
        format=options.format,
        only=_chosen_files(folder, options.images),
        workers=options.workers or usual_workers(),
        progress=progress,
    )


def _copy_arrays(
    name: str,
    overrides: Sequence[str],
    out: str,
    corruptions: list[Corruption],
    options: CopyOptions,
    progress: Progress,
) -> int:
    settings = list(overrides)
    if options.images is not None:
        settings.append(f"data.val_num_samples={options.images}")
    images, labels, ids = read_data(name, settings)
    workers = options.workers or usual_workers()
    return copy_arrays(images, labels, out, corruptions, ids=ids, workers=workers, progress=progress)


def _chosen_files(folder: str, limit: int | None) -> list[str] | None:
    """`class/file` of `limit` images, chosen as `data.val_num_samples` chooses; None where that means all."""
    if limit is None:
        return None
    files = class_files(Path(folder).expanduser())
    if limit >= len(files):
        return None
    return chosen_files(files, limit)


def _whole_number(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a whole number.") from None
