"""Train one recipe, or one under many settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._errors import RunError


def train(
    recipe: str, /, *overrides: str, quiet: bool = False, dry_run: bool = False, slurm: str | None = None
) -> Path | None:
    """Train as a recipe says; writes a run folder, and resumes it when called again.

    Args:
        recipe: a YAML file, or the name of a recipe from `vitruvius list recipes`.
        overrides: settings such as train.epochs=20 out=runs/mine.
        quiet: show no progress.
        dry_run: print recipe, sites, memory and time; write nothing.
        slurm: submit it instead, e.g. partition=gpu,nodes=2,gpus_per_node=8.
    """
    from vitruvius._recipes import find_recipe, processes_of

    file = find_recipe(recipe)
    from vitruvius.training.config import read_recipe

    config = read_recipe(file, overrides)
    from vitruvius._registry import check_name, load_plugins, read_spec
    from vitruvius.data.base import check_data

    load_plugins(config.plugins)
    check_data(config.data)  # before anything slow is imported
    task, settings = read_spec(config.task, where="task")
    if not config.plugins:
        check_name("task", "tasks", task, where="task: ")
        if attack := settings.get("attack"):
            check_name("attack", "attacks", read_spec(attack, where="task.attack")[0], where="task.attack: ")
    result: Any
    if dry_run:
        from vitruvius.training.dry_run import dry_run as estimate

        result = estimate(config, processes=processes_of(file))
    elif slurm is not None:
        from vitruvius.training.slurm import submit_training

        result = submit_training(config, slurm)
    else:
        from vitruvius.training import train as train_run

        result = train_run(config, quiet=quiet)
    print(result)
    return result if isinstance(result, Path) else None


def sweep(
    sweep: str,
    /,
    *overrides: str,
    dry_run: bool = False,
    minutes: float | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    run: str | None = None,
    slurm: str | None = None,
    status: bool = False,
) -> None:
    """Train a recipe under many settings; resumes where it stopped, and ends with a table.

    Args:
        sweep: a file with recipe:, grid:, list:, evaluate: and out:.
        overrides: settings for every run; out=… moves the sweep, evaluate.0.images=8 changes how runs are judged.
        dry_run: list the runs, how they stand and what would fail; write nothing.
        minutes: start no run that would not end in time, by the longest run so far.
        jobs: runs at a time, each in a process of its own (default: 1).
        only: runs whose names fit, e.g. '*_seed1'; may come again.
        run: train and judge this run alone.
        slurm: submit the runs as a job array instead, e.g. partition=gpu,gpus_per_node=1,at_once=8.
        status: how the runs stand, a line each, and the table when none is left; nothing is trained.
    """
    from vitruvius._progress import Bar
    from vitruvius._yaml import read_yaml

    read_yaml(sweep)  # before anything slow is imported
    from vitruvius.training.sweep import Sweep

    plan = Sweep(sweep, overrides)
    if only:
        plan.choose(only)
    if dry_run:
        with Bar("opening runs") as bar:
            faults = plan.find_faults(progress=bar)
        print(plan.listing(faults))
        if faults:
            raise RunError(f"{len(faults)} of {len(plan.chosen)} runs would fail.")
    elif status:
        print(plan.status())
    elif slurm is not None:
        print(plan.submit(slurm))
    elif run is not None:
        outcome = plan.train_one(run)
        if outcome != "finished":
            raise RunError(outcome)
        print(outcome)
    else:
        with Bar("sweep", shown=jobs > 1) as bar:
            table = plan.train(quiet=False, minutes=minutes, jobs=jobs, progress=bar)
        print(table)
        failed = plan.failed()
        if failed:
            raise RunError(f"{len(failed)} of {len(plan.runs)} runs failed: {', '.join(failed)}.")
