"""A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name."""

from __future__ import annotations

import argparse

from vitruvius._errors import ConfigError
from vitruvius.cli._verb import Verb, add_images


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data, the corruptions and the folder to `parser`, that of the verb."""
    add = parser.add_argument
    add("data", metavar="DATA", help="a folder with one folder per class, or a data set: digits, torch/cifar10")
    add("overrides", nargs="*", metavar="data.key=value", help="of a data set: data.root=…, data.val_split=…")
    add("--out", required=True, help="the folder to write; one that was begun is finished")
    add("--corruptions", default="benchmark", help="benchmark (15), extra (4), all, or names: fog,snow")
    add("--severities", default="1,2,3,4,5", help="of a folder, e.g. 1,3 (default: all five)")
    add("--size", default="224", help="of a folder: resized, then the middle square of this many pixels; or keep")
    add("--format", choices=("jpeg", "png"), default="jpeg", help="of a folder: jpeg as published, or png")
    add("--seed", type=int, default=0, help="of the dice (default: 0)")
    add("--scale", choices=("auto", "imagenet", "cifar"), default="auto", help="whose constants (default: by size)")
    add("--textures", help="folder with photographs of frost, instead of drawn frost")
    add_images(parser, "corrupt", default="all; else the fixed random choice of data.val_num_samples=N")
    add("--workers", type=int, help="processes (default: one per core)")


def run(options: argparse.Namespace) -> None:
    """A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name.

    `options` hold what `arguments` adds.
    """
    from vitruvius._progress import Bar
    from vitruvius.corrupted_copies import write_corrupted

    with Bar("corrupting") as progress:
        count = write_corrupted(
            options.data,
            options.overrides,
            out=options.out,
            names=[name.strip() for name in options.corruptions.split(",")],
            severities=[_whole_number(severity, "--severities") for severity in options.severities.split(",")],
            size=None if options.size == "keep" else _whole_number(options.size, "--size"),
            format=options.format,
            seed=options.seed,
            scale=options.scale,
            textures=options.textures,
            images=options.images,
            workers=options.workers,
            progress=progress,
        )
    print(f"{options.out}: {count} files")


def _whole_number(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a whole number.") from None


VERBS = (Verb(name="corrupt", arguments=arguments, run=run),)
