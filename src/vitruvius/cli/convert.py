"""Read a checkpoint of another code base as a run folder, or its settings as a recipe; every key is used or named."""

from __future__ import annotations

import argparse
import sys

from vitruvius.cli._verb import Verb


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, its layout and the folder to `parser`, that of the verb."""
    parser.add_argument("checkpoint", help="a .pth or .safetensors file, or an args.yaml; pickled code is never run")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the converter, e.g. layer=0")
    parser.add_argument("--from", dest="source", required=True, help="its layout; `vitruvius list converters`")
    parser.add_argument("--model", help="the model's name, where the checkpoint does not say it")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights")
    parser.add_argument(
        "--lenient", action="store_true", help="settings that cannot be expressed here: leave them out, with a note"
    )
    parser.add_argument(
        "--out",
        required=True,
        help="the run folder to write, the recipe (--from …-args), or the masks (--from vitcod-masks)",
    )


def run(options: argparse.Namespace) -> None:
    """Read a checkpoint of another code base as a run folder, or its settings as a recipe; no key is lost.

    `options` hold what `arguments` adds.
    """
    from vitruvius._registry import parse_spec
    from vitruvius.converters import MASKS, SETTINGS, convert, write_run

    if options.source in SETTINGS:
        _write_recipe(options)
        return
    if options.source == MASKS:
        _write_masks(options)
        return
    _, settings = parse_spec("settings:" + ",".join(options.settings))
    settings["weights"] = "model"
    if options.ema:
        settings["weights"] = "ema"
    converted = convert(options.checkpoint, options.source, model_name=options.model, **settings)
    for note in converted.notes:
        print(f"note: {note}", file=sys.stderr)
    print(write_run(converted, options.out, origin=f"{options.checkpoint}, read as {options.source}"))


def _write_recipe(options: argparse.Namespace) -> None:
    from vitruvius.converters import read_arguments, write_recipe
    from vitruvius.training import read_recipe

    recipe = read_arguments(options.checkpoint, options.source, lenient=options.lenient)
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)
    path = write_recipe(recipe, options.out, origin=options.checkpoint)
    read_recipe(path)  # what the options cannot mean is said at once
    print(path)


def _write_masks(options: argparse.Namespace) -> None:
    from vitruvius.compression.command import masks_of_arrays

    _, text = masks_of_arrays(options.checkpoint, options.out)
    print(text)


VERBS = (Verb(name="convert", arguments=arguments, run=run),)
