"""Every recipe that reproduces a published command says what the command says, or declares where it does not."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from comparing import commands, declared, differences, merged, show
from safetensors.torch import save_file

from vitruvius._processes import Process
from vitruvius._recipes import processes_of
from vitruvius._yaml import dump_yaml, read_yaml
from vitruvius.cli import main
from vitruvius.listing import find_recipe, recipes, recipes_folder
from vitruvius.models import create_model
from vitruvius.models.wiring import without_files
from vitruvius.training import Config, read_recipe
from vitruvius.training.dry_run import schedule
from vitruvius.training.loop import Trainer
from vitruvius.training.session import open_session, with_rate
from vitruvius.training.sweep import Sweep

NAMES = [name for name, _, _ in recipes()]
NO_COMMAND = {  # a recipe, or the beginning of several: why there is no command to compare with
    "digits/": "the embedded data are ours",
    "speedruns/": "the contest is ours: the least time to a given accuracy",
    "light/xcit_s12_canonical_linf4": "the paper describes it; no file or command of the repository does",
    "structured/cifar10_convmixer_": "the models are released, their training command is not",
}
SWEEPS = sorted((recipes_folder() / "light" / "sweeps").glob("*.yaml"))


@cache
def ours(name: str) -> Config:
    return read_recipe(recipes_folder() / f"{name}.yaml")


def theirs(name: str, folder: Path) -> Config:
    """The published command, read from recipe.yaml in `folder`."""
    (folder / "recipe.yaml").write_text(published(name), encoding="utf-8")
    return read_recipe(folder / "recipe.yaml")


@cache
def published(name: str) -> str:
    """The published command as a recipe, through the command line where its options are timm's."""
    command = commands()[name]
    recipe = command.get("recipe", {})
    if "options" not in command:
        return dump_yaml(recipe)
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "args.yaml").write_text(dump_yaml(command["options"]), encoding="utf-8")
        words = ["convert", str(folder / "args.yaml"), "--from", "timm-args", "--out", str(folder / "converted.yaml")]
        assert main([*words, *(["--lenient"] if "left_out" in command else [])]) == 0
        return dump_yaml(merged(read_yaml(folder / "converted.yaml"), recipe))


def test_every_recipe_has_its_command_or_a_reason_for_having_none() -> None:
    bare = [name for name in NAMES if name not in commands() and not name.startswith(tuple(NO_COMMAND))]
    assert not bare, "write their commands into tests/originals/, or the reason into NO_COMMAND"
    assert not set(commands()) - set(NAMES), "commands without a recipe"


@pytest.mark.parametrize("name", commands())
def test_a_recipe_differs_from_its_command_only_as_its_head_declares(name: str, tmp_path: Path) -> None:
    found = differences(ours(name), theirs(name, tmp_path)) | commands()[name].get("program", {})
    heads = declared(name)
    for key, (mine, other) in found.items():
        pattern = next((pattern for pattern in heads if fnmatchcase(key, pattern)), None)
        assert pattern, f"{name} does not declare 'Differs: {key}: {show(mine)} ≠ {show(other)}, …'"
        assert heads[pattern][:2] == (show(mine), show(other)), key
        assert heads[pattern][2], f"{name}: {key} differs without a reason"
    left_out = f"data.{commands()[name].get('left_out')}"
    idle = [pattern for pattern in heads if pattern != left_out and not any(fnmatchcase(k, pattern) for k in found)]
    assert not idle, "declared, but equal"


@pytest.mark.parametrize("size", ["tiny", "base"])
def test_the_declared_rows_of_qkv_are_those_of_the_models(size: str) -> None:
    name = "kpca/rpc_deit_tiny" if size == "tiny" else "kpca/rpc_symvit_base"
    rows = []
    for model in (f"deit_{size}_patch16_224", f"vitruvius/symvit_{size}_patch16_224"):
        with torch.device("meta"):
            rows.append(create_model(model, depth=1).model.blocks[0].attn.qkv.weight.shape[0])
    assert commands()[name]["program"]["qkv_rows"] == rows


@pytest.mark.parametrize("name", commands())
def test_a_recipe_runs_the_epochs_at_the_peak_rate_and_global_batch_of_its_command(name: str, tmp_path: Path) -> None:
    command = commands()[name]
    for config in (ours(name), theirs(name, tmp_path)):
        assert plan(config, command["processes"]) == pytest.approx(
            (command["gives"]["epochs"], command["gives"]["rate"], command["gives"]["global_batch"]), rel=1e-4
        )


@pytest.mark.parametrize("name", commands())
def test_a_dry_run_tells_the_plan_of_the_command(name: str) -> None:
    processes = processes_of(find_recipe(name)) or 1
    assert processes == commands()[name]["processes"]
    gives = commands()[name]["gives"]
    told = schedule(ours(name), processes)
    assert f": {gives['epochs']} epochs, " in told
    assert f", {gives['global_batch']:,} images an update" in told
    assert float(told.partition("peak rate ")[2].partition(",")[0]) == pytest.approx(gives["rate"], rel=1e-4)


def plan(config: Config, processes: int) -> tuple[float, float, float]:
    """Epochs that run, peak rate, global batch."""
    train = with_rate(config, processes).train
    epochs = train.epochs
    if train.sched == "cosine":
        epochs += train.cooldown_epochs
    assert train.lr is not None
    return epochs, train.lr, config.data.batch_size * processes


SMALL = (
    "data.dataset=fake", "data.num_classes=3", "data.train_num_samples=4", "data.val_num_samples=2",
    "data.batch_size=2", "data.workers=0", "data.aa=null", "data.aug_repeats=0", "data.mix=null", "train.device=cpu",
    "train.precision=fp32",
    "train.holdout=0.5", "train.epochs=2", "train.warmup_epochs=1", "model.pretrained=false", "model.weights=null",
    "model.kwargs.num_classes=3",
)  # fmt: skip
TINY = ("model.kwargs.depth=1", "model.kwargs.embed_dim=96", "data.image_size=32", "model.kwargs.img_size=32")
SIZES = {
    "xcit": ("model.kwargs.num_heads=2", *TINY),
    "deit": ("model.kwargs.depth=2", *TINY[1:]),
    "vit": TINY,
    "resnet18": ("model.kwargs.layers=[1, 1, 1, 1]", "data.image_size=32"),
    "resnet50": ("model.kwargs.layers=[1, 1, 1, 1]", "data.image_size=32"),
    "cait": TINY,
    "convnext": ("model.kwargs.depths=[1, 1, 1, 1]", "model.kwargs.dims=[8, 8, 8, 8]", "data.image_size=32"),
    "poolformer": ("model.kwargs.depths=[1, 1, 1, 1]", "data.image_size=64"),
    "levit": (
        "model.kwargs.depth=[1, 1, 1]",
        "model.kwargs.key_dim=8",
        "model.kwargs.img_size=64",
        "data.image_size=64",
    ),
}


@pytest.mark.parametrize("name", commands())
def test_a_run_made_from_a_converted_file_starts(name: str, tmp_path: Path) -> None:
    config = theirs(name, tmp_path)
    small = [*SMALL, *SIZES[config.model.name.removeprefix("vitruvius/").partition("_")[0]]]
    if "distillation" in str(config.task):
        save_file(create_model("test_resnet", num_classes=3).model.state_dict(), tmp_path / "teacher.safetensors")
        small += ["task.teacher=test_resnet", f"task.teacher_weights={tmp_path / 'teacher.safetensors'}"]
    if "optimised" in str(config.init):
        small.append("init.steps=2")
    if name.startswith("structured/imagenet_impulse"):  # 5×5 filters need as many patches
        small += ["data.image_size=96", "model.kwargs.img_size=96"]
    read = read_recipe(tmp_path / "recipe.yaml", small)
    read = replace(read, attention=tuple(without_files(rule) for rule in read.attention))
    session = open_session(read, Process(device=torch.device("cpu")))
    Trainer(session).train_epoch()
    assert session.updates == 1


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_run_of_a_sweep_resolves_its_rate(file: Path, processes: int) -> None:
    runs = Sweep(file).runs
    rates = {with_rate(run.config, processes).train.lr for run in runs}
    assert all(rate is not None and rate > 0 for rate in rates)
    varied = {replace(run.config.train, lr=None).lr_base for run in runs}
    assert len(rates) >= len(varied)
