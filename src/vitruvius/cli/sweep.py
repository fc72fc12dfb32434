"""Train a recipe under many settings; goes on where it stopped, and ends with a table."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="a file with recipe:, grid:, list: and out:")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for every run; out=… moves the sweep"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and how they stand; write nothing")


def run(options: argparse.Namespace) -> None:
    from vitruvius.listing import find_recipe
    from vitruvius.training.sweep import Sweep

    sweep = Sweep(options.sweep, options.overrides, find=find_recipe)
    print(sweep.listing() if options.dry_run else sweep.train(tell=print))
