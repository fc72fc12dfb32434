"""A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vitruvius._errors import ConfigError


def corrupt(
    data: str,
    /,
    *overrides: str,
    out: Path,
    corruptions: str = "benchmark",
    severities: str = "1,2,3,4,5",
    size: str = "224",
    format: Literal["jpeg", "png"] = "jpeg",
    seed: int = 0,
    scale: Literal["auto", "imagenet", "cifar"] = "auto",
    textures: Path | None = None,
    images: int | None = None,
    workers: int | None = None,
) -> None:
    """A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name.

    Args:
        data: a folder with one folder per class, or a data set: digits, torch/cifar10.
        overrides: settings of a data set: data.root=…, data.val_split=….
        out: the folder to write; one that was begun is finished.
        corruptions: benchmark (15), extra (4), all, or names: fog,snow (default: benchmark).
        severities: e.g. 1,3 (default: all five).
        size: of a folder: resized, then the middle square of this many pixels; or keep (default: 224).
        format: of a folder: jpeg as published, or png (default: jpeg).
        seed: of random numbers (default: 0).
        scale: whose constants (default: auto, by size).
        textures: folder with photographs of frost, instead of drawn frost.
        images: corrupt N images, the fixed random choice of data.val_num_samples=N (default: all).
        workers: processes (default: one per core).
    """
    from vitruvius._files import check_out
    from vitruvius._progress import Bar
    from vitruvius.corrupted_copies import write_corrupted

    check_out(out, data)
    with Bar("corrupting") as progress:
        count = write_corrupted(
            data,
            overrides,
            out=out,
            names=[name.strip() for name in corruptions.split(",")],
            severities=[_whole_number(severity, "--severities") for severity in severities.split(",")],
            size=None if size == "keep" else _whole_number(size, "--size"),
            format=format,
            seed=seed,
            scale=scale,
            textures=None if textures is None else str(textures),
            images=images,
            workers=workers,
            progress=progress,
        )
    print(f"{out}: {count} files")


def _whole_number(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a whole number.") from None
