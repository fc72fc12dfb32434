"""Recipes become typed objects, and every mistake is a small letter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from vitruvius._config import bind, build, override, parse_spec, split_use
from vitruvius._errors import ConfigError
from vitruvius._yaml import dump_yaml, parse_value, read_yaml


@dataclass(frozen=True, kw_only=True)
class Inner:
    epochs: int = 10
    lr: float = 1e-3
    mode: Literal["norm", "value"] = "norm"
    clip: float | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    parts: list[str | dict[str, Any]]
    where: str = "*"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    train: Inner = Inner()
    attention: tuple[Rule, ...] = ()
    scale: tuple[float, float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def make(**data: Any) -> Recipe:
    return build(Recipe, data, source="my.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("4/255", 4 / 255),
        ("-1.5e3", -1500.0),
        ("3", 3),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("[1, 4/255]", [1, 4 / 255]),
        ("runs/1", "runs/1"),
        ("0.1", 0.1),
        ("1_000", 1000),
    ],
)
def test_values_are_read_as_people_write_them(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_a_recipe_becomes_frozen_dataclasses() -> None:
    recipe = make(name="a", train={"lr": 1}, attention=[{"parts": ["rpc", {"use": "mask"}]}], scale=[0.1, 1])
    assert recipe.train.lr == 1.0
    assert isinstance(recipe.train.lr, float)
    assert recipe.attention[0].where == "*"
    assert recipe.scale == (0.1, 1.0)


@pytest.mark.parametrize(
    ("data", "letter"),
    [
        ({"name": "a", "trian": {}}, r"my.yaml: unknown key 'trian'; did you mean 'train'\? Known: name, train"),
        ({"name": "a", "train": {"epoch": 3}}, r"unknown key 'train.epoch'; did you mean 'epochs'\?"),
        ({}, r"my.yaml: name is missing; expected text"),
        ({"name": "a", "train": {"epochs": "ten"}}, r"train.epochs = 'ten', expected a whole number"),
        ({"name": "a", "train": {"epochs": 1.5}}, r"train.epochs = 1.5, expected a whole number"),
        ({"name": "a", "train": {"epochs": True}}, r"train.epochs = True, expected a whole number"),
        ({"name": "a", "train": {"mode": "agc"}}, r"train.mode = 'agc', expected one of norm, value"),
        ({"name": "a", "train": {"clip": "x"}}, r"train.clip = 'x', expected a number or null"),
        ({"name": "a", "train": 3}, r"train is int 3, expected a section"),
        ({"name": "a", "attention": [{"were": "x", "parts": []}]}, r"unknown key 'attention.0.were'; did you mean"),
        ({"name": "a", "attention": {}}, r"attention is dict \{\}, expected a list of sections"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_expectation(data: dict[str, Any], letter: str) -> None:
    with pytest.raises(ConfigError, match=letter):
        make(**data)


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
    def piece(model: object, *, eps: float, steps: int = 10, norm: Literal["linf", "l2"] = "linf") -> None: ...

    assert bind("pgd", piece, {"eps": 1, "norm": "l2"}) == {"eps": 1.0, "norm": "l2"}
    with pytest.raises(ConfigError, match=r"'pgd' has no setting 'step'; did you mean 'steps'\?"):
        bind("pgd", piece, {"eps": 1, "step": 3})
    with pytest.raises(ConfigError, match=r"'pgd' needs a value for eps"):
        bind("pgd", piece, {})
    with pytest.raises(ConfigError, match=r"task: pgd.steps = 'many', expected a whole number"):
        bind("pgd", piece, {"eps": 1, "steps": "many"}, where="task")


def test_a_spec_on_the_command_line_is_a_name_and_settings() -> None:
    assert parse_spec("pgd:eps=4/255,steps=10,norm=l2") == ("pgd", {"eps": 4 / 255, "steps": 10, "norm": "l2"})
    assert parse_spec("autoattack") == ("autoattack", {})
    assert parse_spec("custom:attacks=[fgsm, pgd],eps=1") == ("custom", {"attacks": ["fgsm", "pgd"], "eps": 1})
    with pytest.raises(ConfigError, match=r"key=value"):
        parse_spec("pgd:4/255")


def test_use_names_a_piece() -> None:
    assert split_use("rpc", where="attention") == ("rpc", {})
    assert split_use({"use": "rpc", "iterations": 2}, where="attention") == ("rpc", {"iterations": 2})
    with pytest.raises(ConfigError, match=r"add a key `use:`"):
        split_use({"iterations": 2}, where="attention")


def test_a_resolved_recipe_reads_back_to_itself(tmp_path: Any) -> None:
    recipe = make(name="a", train={"lr": 1e-5}, attention=[{"parts": ["rpc"]}])
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(recipe))
    assert build(Recipe, read_yaml(file), source=str(file)) == recipe


@pytest.mark.parametrize(("text", "letter"), [("- 1", "expected a mapping"), ("a: [", "not valid YAML")])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Any, text: str, letter: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=letter):
        read_yaml(file)


def test_a_missing_recipe_says_where_to_look(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"no recipe at .*absent.yaml"):
        read_yaml(tmp_path / "absent.yaml")


def test_settings_of_a_piece_without_hints_are_taken_as_they_are() -> None:
    def piece(*, size: Any, name=None): ...  # type: ignore[no-untyped-def]

    assert bind("piece", piece, {"size": 3, "name": "x"}, where="here") == {"size": 3, "name": "x"}


@pytest.mark.parametrize("value", [float("nan"), [0.1, float("nan")], 10**30, -(10**30)], ids=str)
def test_no_setting_takes_what_no_tensor_can_hold(value: object) -> None:
    def piece(*, eps: float | tuple[float, ...] = 0.1, steps: int = 1) -> None: ...

    key = "eps" if not isinstance(value, int) else "steps"
    with pytest.raises(ConfigError, match=rf"piece.{key} = .*; nan and whole numbers beyond 64 bits are refused"):
        bind("piece", piece, {key: value})
    assert bind("piece", piece, {"eps": float("inf"), "steps": 2**63 - 1})["steps"] == 2**63 - 1
