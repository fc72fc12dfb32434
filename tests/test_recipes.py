"""Every recipe: it reads, says what it is, builds its model, opens data in its own format and makes steps on them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from own_formats import read_tensorflow, write_data
from vitruvius._config import bind
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius._registry import read_spec
from vitruvius._yaml import dump_yaml
from vitruvius.analysis import analyses
from vitruvius.attention.base import build_core
from vitruvius.heads import Site
from vitruvius.listing import recipes, recipes_folder
from vitruvius.models import create_model
from vitruvius.models.wiring import parts_of, without_files
from vitruvius.surgery import survey
from vitruvius.surgery.sites import match
from vitruvius.tasks import tasks
from vitruvius.training import Config, read_recipe
from vitruvius.training.dry_run import dry_run
from vitruvius.training.loop import Trainer
from vitruvius.training.session import open_session
from vitruvius.training.sweep import Sweep

NAMES = [name for name, _, _ in recipes()]
SWEEPS = sorted((recipes_folder() / "light" / "sweeps").glob("*.yaml"))
COMMON = (
    "data.train_num_samples=8",
    "data.val_num_samples=2",
    "data.batch_size=2",
    "data.workers=0",
    "data.aa=null",
    "data.aug_repeats=0",
    "train.device=cpu",
    "train.precision=fp32",
    "train.alarm_images=2",
    "train.epochs=2",
    "train.warmup_epochs=1",
    "model.pretrained=false",
    "model.weights=null",
)
SIZE32 = ("data.image_size=32", "model.kwargs.img_size=32")
REDUCED = {  # the beginning of a model's name: what makes it small
    "xcit": ("model.kwargs.depth=1", "model.kwargs.embed_dim=32", "model.kwargs.num_heads=2", *SIZE32),
    "cait": ("model.kwargs.depth=1", "model.kwargs.embed_dim=32", "model.kwargs.num_heads=2", *SIZE32),
    "deit": ("model.kwargs.depth=2", "model.kwargs.embed_dim=96", *SIZE32),
    "vit_digits": ("model.kwargs.depth=1",),
    "vit_": ("model.kwargs.depth=1", *SIZE32),
    "levit": (
        "model.kwargs.depth=[1, 1, 1]",
        "model.kwargs.embed_dim=[32, 40, 48]",
        "model.kwargs.key_dim=8",
        "model.kwargs.img_size=64",
        "data.image_size=64",
    ),
    "convmixer": ("model.kwargs.depth=1", "model.kwargs.dim=16"),
    "convnext": ("model.kwargs.depths=[1, 1, 1, 1]", "model.kwargs.dims=[8, 8, 8, 8]", "data.image_size=32"),
    "poolformer": ("model.kwargs.depths=[1, 1, 1, 1]", "model.kwargs.dims=[8, 8, 8, 8]", *SIZE32),
    "preact": (),
    "resnet": ("model.kwargs.layers=[1, 1, 1, 1]", "model.kwargs.channels=[8, 8, 8, 8]", "data.image_size=32"),
}


@cache
def recipe(name: str) -> Config:
    return read_recipe(recipes_folder() / f"{name}.yaml")


def kind_of(config: Config) -> str:
    """What decides how a recipe trains: its family of models, attention, start, task and optimiser."""
    parts = sorted({read_spec(part, where="")[0] for rule in config.attention for part in rule.parts})
    start = [read_spec(config.init, where="")[0]] if config.init else []
    task = read_spec(config.task, where="")[0]
    mixed = ["mix"] if config.data.mix else []
    return "-".join([family(config), *parts, *start, task, config.train.opt, *mixed])


def family(config: Config) -> str:
    name = config.model.name.removeprefix("vitruvius/")
    return next(beginning for beginning in REDUCED if name.startswith(beginning))


KINDS = {kind_of(recipe(name)): name for name in reversed(NAMES)}
FORMATS = {(recipe(name).data.dataset, recipe(name).data.classes): name for name in reversed(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_reads_and_its_head_tells_what_it_is(name: str) -> None:
    config = recipe(name)
    head = [line for line in (recipes_folder() / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    assert len(head[0]) > 20
    assert any(f"vitruvius train {name}" in line for line in head), "the head shows the command"
    assert Path(str(config.out)).parts[0] == "runs"
    if not name.startswith("digits/"):
        assert any(line.startswith("# Data: ") for line in head)
        assert any(line.startswith("# Expected: ") for line in head)
    expected = " ".join(head).partition("Expected: ")[2]
    assert expected.startswith("unverified") == any(word in expected for word in ("recalled", "second-hand"))


def test_names_of_run_folders_do_not_collide() -> None:
    folders = [recipe(name).out for name in NAMES]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_a_recipe_starts_from_are_those_of_another(name: str) -> None:
    weights = recipe(name).model.weights
    if weights is not None:
        assert weights in {recipe(other).out for other in NAMES}


MADE: dict[str, tuple[Any, dict[str, Site]]] = {}


def made(config: Config) -> tuple[Any, dict[str, Site]]:
    """The model of a recipe without its numbers, and its sites where it has rules; equal models share the work."""
    settings = {"positions": config.model.positions, "restride": config.model.restride, **config.model.kwargs}
    key = dump_yaml([config.model.name, settings, bool(config.attention)])
    if key not in MADE:
        with torch.device("meta"):
            model = create_model(config.model.name, **settings)
        MADE[key] = model, survey(model) if config.attention else {}
    return MADE[key]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_its_model_and_the_cores_of_its_sites(name: str) -> None:
    config = recipe(name)
    model, sites = made(config)
    chosen: list[str] = []
    for number, rule in enumerate(config.attention):
        parts = parts_of(without_files(rule), f"attention.{number}")
        found = match(model, list(sites), rule.where)
        with torch.device("meta"):
            assert all(build_core(parts, sites[site]) for site in found)
        chosen += found
    assert len(chosen) == len(set(chosen)), "a site has two rules"
    assert sum(p.numel() for p in model.parameters()) > 1000


@pytest.mark.parametrize("name", NAMES)
def test_the_pieces_a_recipe_names_exist_and_take_its_settings(name: str) -> None:
    config = recipe(name)
    use, settings = read_spec(config.task, where="task")
    bind(use, tasks[use], settings, where="task")
    for question in config.analyses:
        assert question.partition(":")[0] in analyses


def reduced(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Config:
    config = recipe(name)
    settings = [*COMMON, *REDUCED[family(config)], *write_data(config.data.dataset, folder, patch)]
    if config.train.holdout:
        settings.append("train.holdout=0.5")
    use, task = read_spec(config.task, where="task")
    if "attack" in task and "steps" in task["attack"]:
        settings.append("task.attack.steps=2")
    if use == "distillation":
        save_file(create_model("test_resnet", num_classes=102).model.state_dict(), folder / "teacher.safetensors")
        settings += ["task.teacher=test_resnet", f"task.teacher_weights={folder / 'teacher.safetensors'}"]
    if config.data.mix:
        np.zeros((4, 32, 32, 3), np.uint8).tofile(folder / "more_images.bin")
        np.save(folder / "more_labels.npy", np.array([0, 1, 2, 0]))
        settings.append(f"data.mix.root={folder / 'more_images.bin'}")
    if read_spec(config.init or "none", where="init")[0] == "impulse_optimised":
        settings.append("init.steps=2")
    small = read_recipe(recipes_folder() / f"{name}.yaml", settings)
    rules = [without_files(rule) for rule in small.attention]
    return replace(small, attention=tuple(rules), gradual=None)


@pytest.mark.parametrize("name", sorted({*KINDS.values(), *FORMATS.values()}))
def test_a_recipe_makes_steps_on_data_in_its_own_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(reduced(name, tmp_path, monkeypatch), Process(device=torch.device("cpu")))
    before = {key: value.clone() for key, value in session.model.state_dict().items()}
    row = Trainer(session).train_epoch()
    assert session.updates == len(session.train_loader) >= 2
    assert row["train_loss"] > 0
    assert any(not torch.equal(value, before[key]) for key, value in session.model.state_dict().items())


def test_a_recipe_that_cannot_train_is_refused_by_its_dry_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream nothing can be held out."""
    asked = read_tensorflow(monkeypatch)
    config = reduced("light/finetune_caltech102_xcit_s12", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="tfds/caltech101 is a stream; nothing can be held out"):
        dry_run(replace(config, train=replace(config.train, holdout=0.5)))
    assert not asked


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_a_sweep_of_the_papers_can_be_planned(file: Path) -> None:
    published = {
        "data_augmentation_adv": 16,
        "data_augmentation_benign": 16,
        "eps_warmup": 5,
        "eps_warmup_resnet": 5,
        "weight_decay_adv": 7,
        "weight_decay_benign": 7,
        "attack_steps": 3,
        "adv_fine_tuning": 24,
        "tiny_imagenet_wd": 4,
    }
    sweep = Sweep(file)
    assert len(sweep.runs) == published[file.stem]
    for run in sweep.runs:
        use, settings = read_spec(run.config.task, where="task")
        bind(use, tasks[use], settings, where="task")


def test_the_page_of_recipes_is_what_their_heads_say() -> None:
    path = Path(__file__).parents[1] / "scripts" / "recipe_table.py"
    spec = importlib.util.spec_from_file_location("recipe_table", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run: python scripts/recipe_table.py"
