"""Train as a recipe says; writes a run folder, and goes on with it when called again."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe from `vitruvius list recipes`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.epochs=20 out=runs/mine")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--dry-run", action="store_true", help="print recipe, sites, memory and time; write nothing")
    parser.add_argument(
        "--slurm", metavar="KEY=VALUE,…", help="submit it instead, e.g. partition=gpu,nodes=2,gpus_per_node=8"
    )


def run(options: argparse.Namespace) -> None:
    from vitruvius.listing import find_recipe
    from vitruvius.training import read_recipe, train

    recipe = find_recipe(options.recipe)
    config = read_recipe(recipe, options.overrides)
    if options.dry_run:
        from vitruvius.training.dry_run import dry_run

        print(dry_run(config))
    elif options.slurm is not None:
        from vitruvius.training.slurm import submit

        print(submit(config, options.slurm))
    else:
        print(train(config, quiet=options.quiet))
