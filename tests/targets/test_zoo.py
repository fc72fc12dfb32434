"""The zoo: a run becomes a checkpoint with a card, loads by its name, and must be what the card says."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitruvius
from small_run import small_run
from vitruvius._errors import CheckpointError, ConfigError, UnknownName
from vitruvius._files import load_tensors, save_tensors
from vitruvius._yaml import read_yaml
from vitruvius.cli import main
from vitruvius.data import eval_loader
from vitruvius.data.base import class_words
from vitruvius.listing import listing
from vitruvius.targets import open_target

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "zoo.py"
LABELS = np.arange(40) % 10
NUMBERS = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ["--about", "Made by a test.", "--data", "digits", "--licence", "CC BY 4.0.", "--recipe", "digits/softmax"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("zoo") / "run")


@pytest.fixture(scope="module")
def made(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo of one."""
    zoo = tmp_path_factory.mktemp("animals")
    with pytest.MonkeyPatch.context() as patch:
        call(patch, zoo, "make", str(run), "lion", *WORDS, "--threat", "fgsm:eps=8/255", "--threat", "fog:severity=3")
    return zoo


@pytest.fixture
def zoo(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may spoil."""
    place = tmp_path / "zoo"
    shutil.copytree(made, place)
    monkeypatch.setenv("VITRUVIUS_ZOO", str(place))
    monkeypatch.chdir(tmp_path)
    return place


def call(patch: pytest.MonkeyPatch, zoo: Path, *words: str) -> None:
    patch.setattr(sys, "argv", [str(SCRIPT), "--zoo", str(zoo), *words])
    patch.setenv("VITRUVIUS_ZOO", str(zoo))  # which the script sets, and the patch takes back
    runpy.run_path(str(SCRIPT), run_name="__main__")


def card_of(zoo: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((zoo / "lion" / "card.json").read_text())
    return card


def test_a_checkpoint_loads_by_its_name_with_rounded_weights(zoo: Path, run: Path) -> None:
    model = vitruvius.load_model("zoo/lion")
    own = vitruvius.load_model(run).state_dict()
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, own[key].half().float()), key
    assert not model.training


def test_its_card_holds_what_the_rounded_weights_answer(zoo: Path) -> None:
    card = card_of(zoo)
    model, target = vitruvius.load_model("zoo/lion"), open_target("zoo/lion")
    loader = eval_loader(target.config.data, input_size=model.data_config)
    report = vitruvius.evaluate(model, loader, ["fgsm:eps=8/255"])
    assert [row["threat"] for row in card["figures"]] == ["clean", "fgsm:eps=8/255", "fog:severity=3"]
    for row, score in zip(card["figures"], report.threats, strict=False):
        assert (row["accuracy"], row["low"], row["high"], row["n"]) == (score.accuracy, score.low, score.high, score.n)
    assert card["figures"][0]["n"] == 24
    assert card["bytes"] == (zoo / "lion" / "best.safetensors").stat().st_size
    assert card["seed"] == 0
    assert card["trained_with"]["torch"]
    page = (zoo / "lion" / "card.md").read_text()
    for word in ("Made by a test.", "CC BY 4.0.", "vitruvius train digits/softmax", card["sha256"]):
        assert word in page
    assert "out" not in read_yaml(zoo / "lion" / "config.yaml"), "no path of a machine"


def test_a_command_takes_its_name_and_leaves_the_zoo_as_it_is(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name for file in (zoo / "lion").iterdir()}
    assert main(["evaluate", "zoo/lion"]) == 0
    accuracy = card_of(zoo)["figures"][0]["accuracy"]
    assert f"{100 * accuracy:.2f} %" in capsys.readouterr().out
    assert (Path("runs") / "zoo-lion" / "evaluation" / "report.json").is_file()
    assert {file.name for file in (zoo / "lion").iterdir()} == before


def test_it_is_listed_with_its_figures(zoo: Path) -> None:
    text = listing("zoo")
    assert "zoo/lion" in text
    assert f"clean {100 * card_of(zoo)['figures'][0]['accuracy']:.1f} %" in text


def test_a_picture_of_each_class_comes_with_a_checkpoint_whose_data_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    arrays = {f"{name}_{split}": value for split in ("train", "test") for name, value in (("x", pixels), ("y", LABELS))}
    np.savez(tmp_path / "small.npz", **arrays)
    data = ["data.dataset=npz", f"data.root={tmp_path / 'small.npz'}", "data.val_split=test"]
    run = small_run(tmp_path / "run", *data, "data.val_num_samples=null")
    call(
        monkeypatch,
        tmp_path / "zoo",
        "make",
        str(run),
        "lion",
        *data[1:2],
        *WORDS,
        "--pictures",
        "--class-names",
        *NUMBERS,
    )
    assert card_of(tmp_path / "zoo")["figures"][0]["n"] == 40, "measured on all of them"
    shipped = open_target("zoo/lion").config.data
    loader = eval_loader(shipped, input_size=vitruvius.load_model("zoo/lion").data_config)
    x, y = (torch.cat(parts) for parts in zip(*((x, y) for x, y, *_ in loader), strict=True))
    assert y.tolist() == list(range(10))
    assert class_words(shipped) == NUMBERS
    assert vitruvius.look("zoo/lion", x[0]).views[0].answers[0].name in NUMBERS
    assert torch.equal(x, torch.from_numpy(pixels[:10]).movedim(-1, 1) / 255)
    assert open_target("zoo/lion", data[1:2]).config.data.root == str(tmp_path / "small.npz"), (
        "named, it is the whole set"
    )
    assert "one test picture of each class" in (tmp_path / "zoo" / "lion" / "card.md").read_text()


def test_an_unknown_name_is_told_with_the_nearest_one(zoo: Path) -> None:
    with pytest.raises(UnknownName, match=r"no checkpoint named 'loin'.*did you mean 'lion'"):
        vitruvius.load_model("zoo/loin")
    assert main(["evaluate", "zoo/loin"]) == 1


def test_outside_a_checkout_one_is_told_where_the_zoo_is(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRUVIUS_ZOO", str(zoo / "nowhere"))
    with pytest.raises(UnknownName, match="VITRUVIUS_ZOO="):
        vitruvius.load_model("zoo/lion")


def test_weights_that_are_not_those_of_the_card_are_refused(zoo: Path) -> None:
    file = zoo / "lion" / "best.safetensors"
    weights, about = load_tensors(file)
    key = next(iter(weights))
    save_tensors(file, {**weights, key: weights[key] + 1}, about)
    with pytest.raises(CheckpointError, match=r"is not the file that card\.json describes: its SHA-256 is"):
        vitruvius.load_model("zoo/lion")
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        open_target("zoo/lion")


def test_a_card_without_a_hash_is_damaged(zoo: Path) -> None:
    file = zoo / "lion" / "card.json"
    card = card_of(zoo)
    del card["sha256"]
    file.write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="is damaged"):
        vitruvius.load_model("zoo/lion")


def test_only_data_and_device_of_a_checkpoint_can_be_changed(zoo: Path) -> None:
    assert open_target("zoo/lion", ["data.val_num_samples=3"]).config.data.val_num_samples == 3
    with pytest.raises(ConfigError, match="'seed=1' cannot be changed"):
        open_target("zoo/lion", ["seed=1"])


def test_a_run_of_ones_own_under_zoo_is_a_run(zoo: Path, run: Path) -> None:
    shutil.copytree(run, "zoo/mine")
    assert open_target("zoo/mine").is_run
    assert vitruvius.load_model("zoo/mine") is not None


def test_a_checkpoint_is_checked_against_its_card(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, zoo, "check", "lion")
    card = card_of(zoo)
    card["figures"][1]["accuracy"] -= 0.25
    (zoo / "lion" / "card.json").write_text(json.dumps(card))
    with pytest.raises(SystemExit, match=r"zoo/lion is not what its card says: fgsm:eps=8/255: card"):
        call(monkeypatch, zoo, "check", "lion")


def test_a_checkpoint_is_never_made_twice_and_one_that_fails_leaves_nothing(
    zoo: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="is there already"):
        call(monkeypatch, zoo, "make", str(run), "lion", *WORDS)
    with pytest.raises(UnknownName, match="did you mean 'pgd'"):
        call(monkeypatch, zoo, "make", str(run), "tiger", *WORDS, "--threat", "pdg:eps=0.1")
    assert not (zoo / "tiger").exists()


def test_weights_beyond_float16_are_not_rounded_in_silence() -> None:
    rounded = runpy.run_path(str(SCRIPT))["rounded"]
    keep = torch.tensor([True, False])
    assert rounded("mask", keep) is keep
    with pytest.raises(SystemExit, match="head has weights that float16 cannot hold"):
        rounded("head", torch.tensor([1e6]))


def test_every_checkpoint_of_the_repository_is_what_its_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITRUVIUS_ZOO", raising=False)
    cards = sorted((ROOT / "zoo").glob("*/card.json"))
    assert cards
    for file in cards:
        assert vitruvius.load_model(f"zoo/{file.parent.name}").num_classes > 1
        assert file.with_name("best.safetensors").stat().st_size < 12 * 2**20
        card = json.loads(file.read_text())
        assert file.with_name("card.md").read_text() == runpy.run_path(str(SCRIPT))["page"](card)
