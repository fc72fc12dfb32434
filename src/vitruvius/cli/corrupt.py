"""A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitruvius.corruptions import Corruption


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", metavar="DATA", help="a folder with one folder a class, or a data set: digits, torch/cifar10")
    add("overrides", nargs="*", metavar="data.key=value", help="of a data set: data.root=…, data.val_split=…")
    add("--out", required=True, help="the folder to write; one that was begun is finished")
    add("--corruptions", default="benchmark", help="benchmark (15), extra (4), all, or names: fog,snow")
    add("--severities", default="1,2,3,4,5", help="of a folder, e.g. 1,3 (default: all five)")
    add("--size", default="224", help="of a folder: resized, the middle square of so many pixels; keep: as they are")
    add("--format", choices=("jpeg", "png"), default="jpeg", help="of a folder: jpeg as published, or png")
    add("--seed", type=int, default=0, help="of the dice (default: 0)")
    add("--scale", choices=("auto", "imagenet", "cifar"), default="auto", help="whose constants (default: by size)")
    add("--textures", help="folder with photographs of frost, instead of drawn frost")
    add("--limit", type=int, metavar="N", help="so many images, the fixed random choice of data.val_num_samples=N")
    add("--workers", type=int, help="processes (default: one a core)")


def run(options: argparse.Namespace) -> None:
    from vitruvius._bar import Bar
    from vitruvius._errors import ConfigError
    from vitruvius.corruptions._work import usual_workers
    from vitruvius.corruptions.arrays import copy_arrays
    from vitruvius.corruptions.folders import copy_folder

    chosen = wanted(options)
    shared: dict[str, Any] = {"workers": options.workers or usual_workers()}
    with Bar("corrupting") as shared["progress"]:
        if Path(options.data).expanduser().is_dir():
            if options.overrides:
                raise ConfigError(f"{options.overrides[0]!r} is for data sets by name; {options.data} is a folder.")
            shared["size"] = None if options.size == "keep" else number(options.size, "--size")
            shared["only"] = None if options.limit is None else files_of(options.data, options.limit)
            count = copy_folder(options.data, options.out, chosen, format=options.format, **shared)
        else:
            limit = [] if options.limit is None else [f"data.val_num_samples={options.limit}"]
            images, labels, ids = read_data(options.data, [*options.overrides, *limit])
            count = copy_arrays(images, labels, options.out, chosen, ids=ids, **shared)
    print(f"{options.out}: {count} files")


def wanted(options: argparse.Namespace) -> list[Corruption]:
    """The corruptions a command asks for."""
    from vitruvius.corruptions import ALL, GROUPS, parse_corruptions

    names = [name.strip() for name in options.corruptions.split(",")]
    names = [name for part in names for name in GROUPS.get(part, (part,))]
    shared = {"seed": options.seed, "scale": options.scale}
    made = []
    for name in sorted(set(names), key=lambda name: (*ALL, name).index(name)):
        more = {"textures": options.textures} if name == "frost" and options.textures else {}
        for severity in options.severities.split(","):
            settings = {**shared, **more, "severity": number(severity, "--severities")}
            made += parse_corruptions("corrupt", {"name": name, **settings}, where="--corruptions")
    return made


def files_of(folder: str, limit: int) -> list[str] | None:
    """`class/file` of so many images; None where there are no more than that."""
    from vitruvius._errors import ConfigError
    from vitruvius.corruptions.folders import class_files
    from vitruvius.data._sources import chosen_files

    if limit < 1:
        raise ConfigError(f"--limit {limit} leaves no images; 1 or more.")
    files = class_files(Path(folder).expanduser())
    return chosen_files(files, limit) if limit < len(files) else None


def read_data(name: str, overrides: list[str]) -> tuple[Any, Any, Any]:
    """Images (N, H, W, C) uint8, labels (N,) and ids (N,) of the validation images of a data set."""
    import numpy as np

    from vitruvius._config import build, override
    from vitruvius._errors import ConfigError, DataError
    from vitruvius.data import DataConfig
    from vitruvius.data._sources import chosen_ids, open_data

    if Path(name).suffix or name.startswith((".", "/", "~")):
        raise DataError(f"no folder {name}; expected one that holds a folder of images for every class.")
    if wrong := [one for one in overrides if not one.startswith("data.")]:
        raise ConfigError(f"{wrong[0]!r} says nothing about the data; write data.root=…, data.val_split=….")
    config = build(DataConfig, override({"data": {"dataset": name}}, overrides)["data"], source=name)
    side = config.image_size or 32
    data = open_data(config, config.val_split, (config.in_chans or 3, side, side))
    ids = chosen_ids(data, config.val_num_samples)
    pictures = [data.read(index) for index in ids.tolist()]
    sizes = {(image.size, image.mode) for image, _ in pictures}
    if len(sizes) != 1:
        raise DataError(
            f"{name} has images of {len(sizes)} sizes; a copy in one file needs one. Corrupt it on the fly."
        )
    images = np.stack([np.asarray(image) for image, _ in pictures])
    return images.reshape(*images.shape[:3], -1), np.array([label for _, label in pictures]), ids.numpy()


def number(text: str, flag: str) -> int:
    """A whole number, or an error that names the flag."""
    from vitruvius._errors import ConfigError

    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is no whole number.") from None
