"""What `train` takes: a recipe by name, as a path, as a mapping, or as a Config; anything else gets a clear error."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import vitruvius
from small_run import assert_same, small_run, small_session
from vitruvius._errors import ConfigError
from vitruvius._files import load_tensors
from vitruvius.tasks import Objective, tasks
from vitruvius.tasks.inner import Schedule, make_schedule
from vitruvius.tracking.base import Trackers
from vitruvius.tracking.csv import CSV
from vitruvius.training import Config, read_recipe
from vitruvius.training.checkpoint import capture, restore
from vitruvius.training.config import as_config
from vitruvius.training.session import Counters, Session

QUICK = ["train.epochs=1", "train.warmup_epochs=0", "data.train_num_samples=80", "data.val_num_samples=16"]


def test_a_packaged_recipe_is_trained_by_its_name(tmp_path: Path) -> None:
    run = vitruvius.train("digits/softmax", [*QUICK, f"out={tmp_path / 'run'}"], quiet=True)
    assert run == tmp_path / "run"
    assert (run / "best.safetensors").exists()


def test_the_four_forms_of_a_recipe_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {name: vitruvius/vit_digits}\nseed: 3\nout: here\n")
    mapping = {"model": {"name": "vitruvius/vit_digits"}, "seed": 3, "out": "here"}
    expected = read_recipe(file)
    assert isinstance(expected, Config)
    for form in (file, str(file), mapping, expected):
        assert as_config(form) == expected


def test_overrides_apply_to_every_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {name: vitruvius/vit_digits}\n")
    for form in (file, {"model": {"name": "vitruvius/vit_digits"}}, as_config(file)):
        assert as_config(form, ["train.epochs=3"]).train.epochs == 3


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (3, "3 is not a recipe; expected a name such as 'digits/softmax'"),
        (None, "None is not a recipe"),
        (["digits/softmax"], "is not a recipe"),
        ("digits/sofmax", "no recipe at digits/sofmax; did you mean 'digits/softmax'?"),
        ({"modl": {}}, "the recipe: unknown key 'modl'; did you mean 'model'?"),
        ({}, "the recipe: model is missing"),
        ({"model": {"name": "vitruvius/vit_digits"}, "train": {"epochs": 0}}, "the recipe: train.epochs = 0"),
    ],
)
def test_what_is_not_a_recipe_is_refused_before_anything_is_written(
    recipe: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        vitruvius.train(recipe)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_is_answered_with_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: vitruvius/vit_digits}\n")
    with pytest.raises(ConfigError, match=r"is a run folder; its recipe is .*config\.yaml"):
        as_config(tmp_path)
    with pytest.raises(ConfigError, match=r"is a folder; expected a recipe's YAML file"):
        as_config(tmp_path.parent)


def test_a_task_a_schedule_and_a_tracker_are_written_in_one_grammar() -> None:
    for schedule in ("linear:epochs=4", {"use": "linear", "epochs": 4}, make_schedule("linear:epochs=4")):
        assert make_schedule(schedule) == make_schedule({"use": "linear", "epochs": 4})
    (tracker,) = Trackers.of([{"use": "csv"}]).members
    assert isinstance(tracker, CSV)
    own = CSV()
    assert Trackers.of([own, "csv"]).members[0] is own
    with pytest.raises(ConfigError, match=r"tracking: 3 is not a tracker; expected a name such as 'csv'"):
        Trackers.of([3])
    with pytest.raises(ConfigError, match=r"task\.schedule: unknown key 'linear.epoch'; did you mean 'epochs'\?"):
        make_schedule("linear:epoch=4")
    with pytest.raises(ConfigError, match=r"task\.schedule is a CSV; expected a Schedule"):
        make_schedule(own)  # type: ignore[arg-type]
    assert isinstance(make_schedule("constant"), Schedule)


def test_a_recipes_task_may_be_written_in_one_line(tmp_path: Path) -> None:
    words = ["train.epochs=1", "data.train_num_samples=16", "train.alarm=none", "train.select=clean"]
    short = small_run(tmp_path / "a", "task=adversarial:eps=0.1,attack=pgd", *words)
    long = small_run(tmp_path / "b", "task={use: adversarial, eps: 0.1, attack: pgd}", *words)
    assert_same(load_tensors(short / "last.safetensors"), load_tensors(long / "last.safetensors"))


def test_an_objective_declares_what_the_loop_looks_at() -> None:
    plain = tasks.make("supervised", vitruvius.create_model("vitruvius/vit_digits"))
    assert plain.replays == 1
    assert plain.threat is None
    plain.at(epoch=0, update=0, updates_per_epoch=1)
    free = tasks.make("free:eps=0.1,replays=3", vitruvius.create_model("vitruvius/vit_digits"))
    assert free.replays == 3
    assert free.threat == ("linf", 0.1)


def test_a_task_that_is_not_an_objective_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks._pieces, "stranger", lambda model: nn.Identity())
    with pytest.raises(ConfigError, match=r"task 'stranger' makes a Identity; expected a vitruvius\.tasks\.Objective"):
        small_run(tmp_path / "run", "task=stranger")
    assert issubclass(tasks["supervised"], Objective)  # type: ignore[arg-type]


def test_every_counter_of_a_session_is_saved_and_put_back(tmp_path: Path) -> None:
    made_new = {one.name for one in fields(Session)} - {one.name for one in fields(Counters)}
    without_default = {one.name for one in fields(Session) if one.default is MISSING and one.default_factory is MISSING}
    assert made_new == without_default, "a field that begins at some value is a counter and belongs to Counters"

    session = small_session()
    values = {
        one.name: type(getattr(session, one.name))(i + 1)
        for i, one in enumerate(fields(Counters))
        if one.name != "rows"
    }
    for name, value in values.items():
        setattr(session, name, value)
    session.rows = [{"epoch": 0}]
    state = capture(session)
    other = small_session()
    restore(other, state, "here")
    assert {name: getattr(other, name) for name in values} == values
    assert other.rows == [{"epoch": 0}]
