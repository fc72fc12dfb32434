"""Every recipe that reproduces a published command says what the command says, or declares where it does not."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from comparing import commands, declared, differences, show

from vitruvius.cli import main
from vitruvius.listing import find_recipe, recipes, recipes_folder
from vitruvius.training import Config, read_recipe
from vitruvius.training._session import with_rate
from vitruvius.training.sweep import Sweep

NAMES = [name for name, _, _ in recipes()]
NO_COMMAND = {  # a recipe, or the beginning of several: why there is no command to compare with
    "digits/": "the embedded data are ours",
    "light/xcit_s12_canonical_linf4": "the paper describes it; no file or command of the repository does",
    "structured/cifar10_convmixer_": "the models are released, their training command is not",
}
SWEEPS = sorted((recipes_folder() / "light" / "sweeps").glob("*.yaml"))


@cache
def ours(name: str) -> Config:
    return read_recipe(recipes_folder() / f"{name}.yaml")


def theirs(name: str, folder: Path) -> Config:
    """The published command, through the command line."""
    command = commands()[name]
    options = {key: str(value) if value is None and key == "aa" else value for key, value in command["options"].items()}
    file = folder / "args.yaml"
    file.write_text("".join(f"{key}: {_yaml(value)}\n" for key, value in options.items()), encoding="utf-8")
    words = ["convert", str(file), "--from", command["from"], "--out", str(folder / "recipe.yaml")]
    if "left_out" in command:
        words.append("--lenient")
    assert main(words) == 0
    return read_recipe(folder / "recipe.yaml")


def _yaml(value: Any) -> str:
    from vitruvius._yaml import dump_yaml

    if isinstance(value, dict | list):
        return "\n" + "".join(f"  {line}\n" for line in dump_yaml(value).splitlines())
    return dump_yaml([value]).strip().removeprefix("- ")


def test_every_recipe_has_its_command_or_a_reason_for_having_none() -> None:
    bare = [name for name in NAMES if name not in commands() and not name.startswith(tuple(NO_COMMAND))]
    assert not bare, "write their commands into tests/originals/, or the reason into NO_COMMAND"
    assert not set(commands()) - set(NAMES), "commands without a recipe"


@pytest.mark.parametrize("name", commands())
def test_a_recipe_differs_from_its_command_only_as_its_head_declares(name: str, tmp_path: Path) -> None:
    found = differences(ours(name), theirs(name, tmp_path))
    heads = declared(name)
    for key, (mine, other) in found.items():
        pattern = next((pattern for pattern in heads if fnmatchcase(key, pattern)), None)
        assert pattern, f"{name} does not declare 'Differs: {key}: {show(mine)} ≠ {show(other)}, …'"
        assert heads[pattern][:2] == (show(mine), show(other)), key
        assert heads[pattern][2], f"{name}: {key} differs without a reason"
    left_out = f"data.{commands()[name].get('left_out')}"
    idle = [pattern for pattern in heads if pattern != left_out and not any(fnmatchcase(k, pattern) for k in found)]
    assert not idle, "declared, but equal"


@pytest.mark.parametrize("name", commands())
def test_a_recipe_runs_the_epochs_at_the_peak_rate_and_global_batch_of_its_command(name: str, tmp_path: Path) -> None:
    command = commands()[name]
    for config in (ours(name), theirs(name, tmp_path)):
        assert plan(config, command["processes"]) == pytest.approx(
            (command["gives"]["epochs"], command["gives"]["rate"], command["gives"]["global_batch"]), rel=1e-4
        )


def plan(config: Config, processes: int) -> tuple[float, float, float]:
    """Epochs that run, peak rate, global batch."""
    train = with_rate(config, processes).train
    epochs = train.epochs
    if train.sched == "cosine":
        epochs += train.cooldown_epochs
    assert train.lr is not None
    return epochs, train.lr, config.data.batch_size * processes


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_run_of_a_sweep_resolves_its_rate(file: Path, processes: int) -> None:
    runs = Sweep(file, find=lambda name: find_recipe(str(name))).runs
    rates = {with_rate(run.config, processes).train.lr for run in runs}
    assert all(rate is not None and rate > 0 for rate in rates)
    varied = {replace(run.config.train, lr=None).lr_base for run in runs}
    assert len(rates) >= len(varied)
