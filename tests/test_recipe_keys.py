"""`vitruvius list keys`, docs/keys.md, the JSON schema: every key of a recipe with type, default and what it does."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vitruvius import create_model
from vitruvius._config import key, required, section
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._yaml import read_yaml
from vitruvius.cli import main
from vitruvius.listing import listing, recipes_folder
from vitruvius.recipe_keys import Key, keys_of, recipe_schema, sections


@section("some")
class Some:
    """A section for these tests."""

    name: str = required("who")
    size: int = key(3, "how large", ge=0, le=9)
    colours: list[str] = key([], "which ones")
    ratio: tuple[float, float] | None = key(None, "from and to")


def test_a_section_lists_its_keys_in_order() -> None:
    assert keys_of(Some) == [
        Key("name", "text", "", "who"),
        Key("size", "a whole number from 0 to 9", "3", "how large"),
        Key("colours", "a list of texts", "[]", "which ones"),
        Key("ratio", "a list of 2 numbers or null", "null", "from and to"),
    ]


def test_a_piece_explains_its_settings_in_its_docstring() -> None:
    def piece(*, steps: int, loud: bool = False) -> None:
        """Do something.

        steps: how often
        """

    assert keys_of(piece) == [
        Key("steps", "a whole number", "", "how often"),
        Key("loud", "true or false", "false", ""),
    ]


def test_every_key_of_every_section_says_what_it_does() -> None:
    silent = [f"{title}.{key.name}" for title, part in sections().items() for key in part.keys if not key.help]
    assert silent == []
    assert {"recipe", "model", "data", "train", "task adversarial", "task.schedule linear"} <= set(sections())


def test_keys_of_one_section_or_of_all_are_listed() -> None:
    text = listing("keys", "train")
    assert text.startswith("train: ")
    assert "  epochs " in text
    assert "a whole number of at least 1; default 10" in text
    assert "\ntrain.keep: " in text
    assert "task adversarial" not in text
    assert "eps" in listing("keys", "task")
    assert "must be given" in listing("keys", "model")
    assert "`vitruvius list keys task`" in listing("keys")


def test_an_unknown_section_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no section 'trian'; did you mean 'train'\? Sections: recipe, "):
        listing("keys", "trian")
    with pytest.raises(ConfigError, match="only `vitruvius list keys` takes a section"):
        listing("tasks", "train")


def test_the_page_of_keys_is_up_to_date() -> None:
    path = Path(__file__).parents[1] / "scripts" / "key_table.py"
    spec = importlib.util.spec_from_file_location("key_table", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    written, made = (re.split("\n(?=## )", text) for text in (table.PAGE.read_text(encoding="utf-8"), table.page()))
    assert set(written) <= set(made), "run: python scripts/key_table.py"
    missing = [part.splitlines()[0] for part in made if part not in written]
    assert all(" " in title.removeprefix("## ") for title in missing), "only a new piece need not be there yet"


@pytest.fixture(scope="module", params=[False, True], ids=["sections", "pieces"])
def check(request: pytest.FixtureRequest) -> Any:
    """What the schema says against a recipe."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = recipe_schema(pieces=request.param)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return lambda recipe: [error.message for error in validator.iter_errors(recipe)]


def test_every_packaged_recipe_fits_the_schema(check: Any) -> None:
    files = [file for file in sorted(recipes_folder().glob("*/*.yaml")) if "model" in read_yaml(file)]
    assert len(files) > 50
    assert {file.stem: check(read_yaml(file)) for file in files if check(read_yaml(file))} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"trian": {}},
        {"train": {"epoch": 3}},
        {"train": {"epochs": 0}},
        {"train": {"lr": "fast"}},
        {"data": {"mix": {"dataset": "npz"}}},
        {"task": 3},
    ],
    ids=str,
)
def test_what_a_recipe_refuses_does_not_fit_the_schema(check: Any, wrong: dict[str, Any]) -> None:
    assert check({"model": {"name": "resnet18"}, **wrong})


def test_numbers_may_be_written_as_fractions_for_readers_that_take_them_for_text(check: Any) -> None:
    assert not check({"model": {"name": "a", "mean": ["1/2"]}, "train": {"lr": "1e-5"}})


def test_the_schema_knows_the_pieces_and_leaves_room_for_those_of_plugins() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(recipe_schema(pieces=True))

    def fits(**sections: Any) -> bool:
        return bool(validator.is_valid({"model": {"name": "a"}, **sections}))

    assert fits(task={"use": "trades", "eps": 0.1, "beta": 3})
    assert not fits(task={"use": "trades", "eps": 0.1, "betta": 3})
    assert not fits(task={"use": "trades"})
    assert fits(task={"use": "mine", "colour": "red"})
    assert fits(task="trades:eps=4/255", init={"use": "mimetic", "where": "*"})
    assert not fits(attention=[{"parts": [{"use": "rpc", "iterations": "many"}]}])


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema()


@pytest.mark.parametrize("words", [["train", "x", "--colour"], ["list", "--epochs"], ["evaluate", "x", "--epochs"]])
def test_a_flag_that_is_no_key_gets_no_hint(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "write" not in capsys.readouterr().err


def test_a_model_of_ours_without_its_prefix_is_suggested_with_it() -> None:
    with pytest.raises(UnknownName, match=r"no model named 'vit_digits'; did you mean 'vitruvius/vit_digits'\?"):
        create_model("vit_digits")
