"""Every recipe: it reads, says what it is, builds its model, and makes two steps on fake images of reduced size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vitruvius._processes import Process
from vitruvius.listing import recipes, recipes_folder
from vitruvius.models import create_model
from vitruvius.models._wiring import parts_of
from vitruvius.surgery import survey
from vitruvius.surgery.rewiring import match
from vitruvius.training import read_recipe
from vitruvius.training._epoch import train_epoch
from vitruvius.training._session import open_session

NAMES = [name for name, _, _ in recipes()]
KINDS = {  # one recipe for each way of training; the others differ in data and start only
    "digits/softmax",
    "digits/rpc",
    "structured/cifar10_impulse3",
    "structured/imagenet_mimetic",
}
REDUCED = (
    "data.dataset=fake",
    "data.num_classes=3",
    "data.train_num_samples=8",
    "data.val_num_samples=2",
    "data.batch_size=2",
    "data.workers=0",
    "data.aa=null",
    "train.device=cpu",
    "train.precision=fp32",
    "train.holdout=0.5",
    "train.epochs=2",
    "train.warmup_epochs=1",
    "model.kwargs.depth=1",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_reads_and_its_head_tells_what_it_is(name: str) -> None:
    file = recipes_folder() / f"{name}.yaml"
    config = read_recipe(file)
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert len(head[0]) > 20
    assert any(f"vitruvius train {name}" in line for line in head), "the head shows the command"
    assert Path(str(config.out)).parts[0] == "runs"
    assert config.data.dataset


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_its_model(name: str) -> None:
    config = read_recipe(recipes_folder() / f"{name}.yaml")
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.kwargs)
    for number, rule in enumerate(config.attention):
        assert match(model, list(survey(model)), rule.where)
        assert parts_of(rule, f"attention.{number}")


def watch(*_: Any) -> None:
    pass


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_recipe_makes_two_steps_on_fake_images(name: str) -> None:
    small = ["data.image_size=32", "model.kwargs.img_size=32"] if "imagenet" in name else []
    config = read_recipe(recipes_folder() / f"{name}.yaml", [*REDUCED, *small])
    session = open_session(config, Process(device=torch.device("cpu")))
    before = {key: value.clone() for key, value in session.model.state_dict().items()}
    row = train_epoch(session, watch)
    assert session.updates == 2
    assert row["train_loss"] > 0
    assert any(not torch.equal(value, before[key]) for key, value in session.model.state_dict().items())
