"""Train as a recipe says; writes a run folder, and goes on with it when called again."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe from `vitruvius list recipes`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.epochs=20 out=runs/mine")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> None:
    from vitruvius.listing import find_recipe
    from vitruvius.training import read_recipe, train

    print(train(read_recipe(find_recipe(options.recipe), options.overrides), quiet=options.quiet))
