"""A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name."""

from __future__ import annotations

import argparse

from vitruvius.cli._verb import Verb, add_images, warn_deprecated


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
    add("--limit", type=int, metavar="N", help="deprecated: --images")
    add("--workers", type=int, help="processes (default: one per core)")


def run(options: argparse.Namespace) -> None:
    """A corrupted copy of data, written once: ImageNet-C's layout for a folder, CIFAR-10-C's for a data set by name.

    `options` hold what `arguments` adds.
    """
    from vitruvius.corrupted_copies import CopyOptions, copy_data

    images = options.images
    if options.limit is not None:
        warn_deprecated("--limit N", "--images N")
        images = options.limit if images is None else images
    settings = CopyOptions(
        corruptions=options.corruptions,
        severities=options.severities,
        size=options.size,
        format=options.format,
        seed=options.seed,
        scale=options.scale,
        textures=options.textures,
        images=images,
        workers=options.workers,
    )
    count = copy_data(options.data, options.overrides, options.out, settings)
    print(f"{options.out}: {count} files")


VERBS = (Verb(name="corrupt", arguments=arguments, run=run),)
