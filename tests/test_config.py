"""Recipes become typed objects, and every mistake is one sentence that names its key."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest

from vitruvius._config import bind, build, key, override, required, schema_of, section
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._yaml import dump_yaml, parse_value, read_yaml
from vitruvius.attacks.base import LINF, Norm
from vitruvius.data import DataConfig
from vitruvius.models.config import AttentionRule
from vitruvius.training import TrainConfig


@section("train")
class Inner:
    epochs: int = key(10, "how long", ge=1)
    lr: float = 1e-3
    mode: Literal["norm", "value"] = "norm"
    clip: float | None = key(None, "limit", gt=0)
    share: float = key(0.0, "part", ge=0, le=1)
    compile: bool = False

    def __post_init__(self) -> None:
        if self.mode == "value" and self.clip is None:
            raise ConfigError("train.mode = value needs train.clip.")


@section("rule")
class Rule:
    parts: list[str | dict[str, Any]] = required("what")
    where: str = "*"


@section("recipe")
class Recipe:
    name: str = required("who")
    train: Inner = Inner()
    attention: tuple[Rule, ...] = ()
    scale: tuple[float, float] | None = None
    extra: dict[str, Any] = key({}, "anything")


def make(**data: Any) -> Recipe:
    return build(Recipe, data, source="my.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("4/255", 4 / 255),
        ("-1.5e3", -1500.0),
        ("3", 3),
        ("010", 10),
        ("-0x1f", -31),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("[1, 4/255]", [1, 4 / 255]),
        ("runs/1", "runs/1"),
        ("0.1", 0.1),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2020-01-01", "2020-01-01"),
    ],
)
def test_values_are_read_as_people_write_them(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
    assert parse_value(dump_yaml([value])) == [value]


@pytest.mark.parametrize("text", ["1e-5", "4/255", "1:30", "no", "010", "", "~", "0x1f", "- a", "a: b"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse_value(dump_yaml({"value": text})) == {"value": text}


def test_a_key_that_is_repeated_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("train:\n  lr: 1\n  epochs: 3\n  lr: 2\n")
    with pytest.raises(ConfigError, match=r"twice.yaml .*'lr' is there twice, in lines 2 and 4"):
        read_yaml(file)
    file.write_text("a: &a {lr: 1}\nb: {<<: *a, lr: 2}\n")
    assert read_yaml(file)["b"] == {"lr": 2}


def test_a_recipe_becomes_frozen_dataclasses() -> None:
    recipe = make(name="a", train={"lr": 1}, attention=[{"parts": ["rpc", {"use": "mask"}]}], scale=[0.1, 1])
    assert recipe.train.lr == 1.0
    assert isinstance(recipe.train.lr, float)
    assert recipe.attention[0].where == "*"
    assert recipe.scale == (0.1, 1.0)
    assert make(name="a").extra is not make(name="a").extra
    assert pickle.loads(pickle.dumps(DataConfig(batch_size=3))) == DataConfig(batch_size=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "b"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"name": "a", "trian": {}}, r"^my.yaml: unknown key 'trian'; did you mean 'train'\? Known: name, train"),
        ({"trian": {}}, r"unknown key 'trian'"),  # rather than that name is missing
        ({"name": "a", "train": {"epoch": 3}}, r"unknown key 'train.epoch'; did you mean 'epochs'\?"),
        ({"name": "a", 3: 4}, r"unknown key '3'"),
        ({}, r"^my.yaml: name is missing; expected text\.$"),
        ({"name": "a", "train": {"epochs": "ten"}}, r"train.epochs = 'ten', expected a whole number of at least 1\."),
        ({"name": "a", "train": {"epochs": "3"}}, r"train.epochs = '3', expected a whole number"),
        ({"name": "a", "train": {"epochs": 1.0}}, r"train.epochs = 1.0, expected a whole number"),
        ({"name": "a", "train": {"epochs": True}}, r"train.epochs = True, expected a whole number"),
        ({"name": "a", "train": {"epochs": 0}}, r"train.epochs = 0, expected a whole number of at least 1"),
        ({"name": "a", "train": {"compile": 1}}, r"train.compile = 1, expected true or false"),
        ({"name": "a", "train": {"lr": float("nan")}}, r"train.lr = nan, expected a number"),
        ({"name": "a", "train": {"lr": float("inf")}}, r"train.lr = inf, expected a number"),
        (
            {"name": "a", "train": {"mode": "nrom"}},
            r"train.mode = 'nrom', expected one of norm, value; did you mean 'n",
        ),
        ({"name": "a", "train": {"clip": "x"}}, r"train.clip = 'x', expected a number above 0 or null"),
        ({"name": "a", "train": {"share": 2}}, r"train.share = 2, expected a number from 0 to 1"),
        ({"name": "a", "train": {"mode": "value"}}, r"^my.yaml: train.mode = value needs train.clip\.$"),
        ({"name": "a", "train": 3}, r"train = 3, expected a section"),
        ({"name": 3}, r"name = 3, expected text"),
        ({"name": "a", "attention": [{"were": "x", "parts": []}]}, r"unknown key 'attention.0.were'; did you mean"),
        ({"name": "a", "attention": [{"parts": ["a", 3]}]}, r"attention.0.parts.1 = 3, expected text or a mapping"),
        ({"name": "a", "attention": {}}, r"attention = \{\}, expected a list of sections"),
        ({"name": "a", "scale": [1, "x"]}, r"scale.1 = 'x', expected a number"),
        ({"name": "a", "scale": 1}, r"scale = 1, expected a list of 2 numbers or null"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_file_key_and_expectation(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(**data) if all(isinstance(key, str) for key in data) else build(Recipe, data, source="my.yaml")


def test_sections_that_are_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^data.batch_size = 0, expected a whole number of at least 1"):
        DataConfig(batch_size=0)
    with pytest.raises(ConfigError, match=r"unknown key 'data.mix.fracton'; did you mean 'fraction'"):
        DataConfig(mix={"dataset": "npz", "fracton": 0.5})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train.warmup_epochs = 5, expected fewer"):
        dataclasses.replace(TrainConfig(), warmup_epochs=5, epochs=2)
    assert DataConfig(root=Path("a") / "b").root == "a/b"  # type: ignore[arg-type]
    assert AttentionRule(parts=["rpc:iterations=2", "mask"]).parts == [{"use": "rpc", "iterations": 2}, "mask"]


def test_overrides_reach_into_sections_and_lists_without_touching_the_original() -> None:
    data = {"name": "a", "attention": [{"parts": ["rpc"]}]}
    result = override(data, ["train.lr=1e-4", "attention.0.where=blocks.0.*", "extra.deep.er=4/255"])
    assert result["train"] == {"lr": 1e-4}
    assert result["attention"][0]["where"] == "blocks.0.*"
    assert result["extra"]["deep"]["er"] == 4 / 255
    assert data == {"name": "a", "attention": [{"parts": ["rpc"]}]}


@pytest.mark.parametrize("setting", ["train.lr", "=3", "attention.4.where=x", "name.x=3"])
def test_a_malformed_override_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"override"):
        override({"name": "a", "attention": [{"parts": []}]}, [setting])


def test_settings_are_bound_against_the_signature() -> None:
    def piece(model: object, *, eps: float, steps: int = 10, norm: Norm = LINF, bounds: tuple[float, ...] = ()) -> None:
        """Nothing.

        eps: the radius
        """

    assert bind("pgd", piece, {"eps": 1, "norm": "linf", "bounds": [0, 1]}) == {
        "eps": 1.0,
        "norm": LINF,
        "bounds": (0.0, 1.0),
    }
    for settings, sentence in {
        ("eps", "step"): r"^task: unknown key 'pgd.step'; did you mean 'steps'\? Known: eps, steps, norm, bounds\.",
        (): r"^task: pgd.eps is missing; expected a number\.",
        ("eps", "norm"): r"^task: pgd.norm = 3, expected Norm\.",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            bind("pgd", piece, dict.fromkeys(settings, 3), where="task")
    with pytest.raises(UnknownName, match="l7"):
        bind("pgd", piece, {"eps": 1, "norm": "l7"})
    assert schema_of(piece)["properties"]["eps"] == {"type": "number", "description": "the radius"}
    assert schema_of(piece)["properties"]["steps"]["default"] == 10


def test_settings_of_a_piece_without_hints_are_taken_as_they_are() -> None:
    def piece(*, size: Any, name=None, odd: Absent = None): ...  # type: ignore[no-untyped-def, name-defined] # noqa: F821

    given = {"size": 3, "name": "x", "odd": piece}
    assert bind("piece", piece, given, where="here") == given


@pytest.mark.parametrize("value", [float("nan"), [0.1, float("nan")], 10**30, -(10**30)], ids=str)
def test_no_setting_takes_what_no_tensor_can_hold(value: object) -> None:
    def piece(*, eps: float | tuple[float, ...] = 0.1, steps: int = 1) -> None: ...

    name = "eps" if not isinstance(value, int) else "steps"
    with pytest.raises(ConfigError, match=rf"piece.{name} = .*, expected a (number|whole number, of at most 64 bits)"):
        bind("piece", piece, {name: value})
    assert bind("piece", piece, {"eps": float("inf"), "steps": 2**63 - 1})["steps"] == 2**63 - 1


def test_a_resolved_recipe_reads_back_to_itself(tmp_path: Path) -> None:
    recipe = make(name="a", train={"lr": 1e-5}, attention=[{"parts": ["rpc"]}])
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(recipe))
    assert build(Recipe, read_yaml(file), source=str(file)) == recipe


@pytest.mark.parametrize(("text", "word"), [("- 1", "expected a mapping"), ("a: [", "not valid YAML")])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_yaml(file)
    with pytest.raises(ConfigError, match=r"no recipe at .*absent.yaml"):
        read_yaml(tmp_path / "absent.yaml")
