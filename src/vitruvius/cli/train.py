"""Train one recipe, or one under many settings."""

from __future__ import annotations

import argparse

from vitruvius.cli._verb import Verb


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, overrides and how it is run to `parser`, that of the verb."""
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe from `vitruvius list recipes`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.epochs=20 out=runs/mine")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--dry-run", action="store_true", help="print recipe, sites, memory and time; write nothing")
    parser.add_argument(
        "--slurm", metavar="KEY=VALUE,…", help="submit it instead, e.g. partition=gpu,nodes=2,gpus_per_node=8"
    )


def run_train(options: argparse.Namespace) -> None:
    """Train as a recipe says; writes a run folder, and goes on with it when called again.

    `options` hold what `train_arguments` adds.
    """
    from vitruvius.listing import find_recipe
    from vitruvius.training import read_recipe, train

    recipe = find_recipe(options.recipe)
    config = read_recipe(recipe, options.overrides)
    if options.dry_run:
        from vitruvius._recipes import processes_of
        from vitruvius.training.dry_run import dry_run

        print(dry_run(config, processes=processes_of(recipe)))
    elif options.slurm is not None:
        from vitruvius.training.slurm import submit

        print(submit(config, options.slurm))
    else:
        print(train(config, quiet=options.quiet))


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sweep file, overrides and how it is run to `parser`, that of the verb."""
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="a file with recipe:, grid:, list:, evaluate: and out:")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="for every run; out=… moves the sweep, evaluate.0.images=8 changes how runs are judged",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs, how they stand and what would fail; write nothing"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="start no run that would not end in time, by the longest run so far"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each in a process of its own (default 1)"
    )
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="runs whose names fit, e.g. '*_seed1'; may come again"
    )
    parser.add_argument("--run", metavar="NAME", help="train and judge this run alone")


def run_sweep(options: argparse.Namespace) -> None:
    """Train a recipe under many settings; goes on where it stopped, and ends with a table.

    `options` hold what `sweep_arguments` adds.
    """
    from vitruvius._errors import RunError
    from vitruvius._progress import Bar, messages_shown
    from vitruvius.training.sweep import Sweep

    sweep = Sweep(options.sweep, options.overrides)
    if options.only:
        sweep.choose(options.only)
    if options.dry_run:
        with Bar("opening runs") as bar:
            faults = sweep.find_faults(progress=bar)
        print(sweep.listing(faults))
        if faults:
            raise RunError(f"{len(faults)} of {len(sweep.chosen)} runs would fail.")
    elif options.run is not None:
        outcome = sweep.train_one(options.run)
        if outcome != "finished":
            raise RunError(outcome)
        print(outcome)
    else:
        with messages_shown(), Bar("sweep", shown=options.jobs > 1) as bar:
            table = sweep.train(quiet=False, minutes=options.minutes, jobs=options.jobs, progress=bar)
        print(table)
        failed = sweep.failed()
        if failed:
            raise RunError(f"{len(failed)} of {len(sweep.runs)} runs failed: {', '.join(failed)}.")


VERBS = (
    Verb(name="train", arguments=train_arguments, run=run_train),
    Verb(name="sweep", arguments=sweep_arguments, run=run_sweep),
)
