"""`vitruvius list keys` and docs/keys.md: every key of a recipe with type, default and what it does."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vitruvius import create_model
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._keys import Key, key, key_from, keys_of, settings_of
from vitruvius.cli import main
from vitruvius.listing import listing
from vitruvius.recipe_keys import find_key, sections


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section for these tests."""

    name: str = field(metadata={"help": "who"})
    size: int = key(3, "how large")
    colours: list[str] = key_from(list, "which ones")
    ratio: tuple[float, float] | None = key(None, "from and to")


def test_a_section_lists_its_keys_in_order() -> None:
    assert keys_of(Section) == [
        Key("name", "text", "", "who"),
        Key("size", "a whole number", "3", "how large"),
        Key("colours", "a list of texts", "[]", "which ones"),
        Key("ratio", "a list of numbers or null", "null", "from and to"),
    ]
    assert Section(name="a").size == 3
    assert Section(name="a").colours == []


def test_a_piece_explains_its_settings_in_its_docstring() -> None:
    def piece(*, steps: int, loud: bool = False) -> None:
        """Do something.

        steps: how often
        """

    assert settings_of(piece) == [
        Key("steps", "a whole number", "", "how often"),
        Key("loud", "true or false", "false", ""),
    ]


def test_every_key_of_every_section_says_what_it_does() -> None:
    silent = [f"{name}.{one.name}" for name, (_, keys) in sections().items() for one in keys if not one.help]
    assert silent == []
    assert {"recipe", "model", "data", "train", "task adversarial", "task.schedule linear"} <= set(sections())


def test_keys_of_one_section_or_of_all_are_listed() -> None:
    text = listing("keys", "train")
    assert text.startswith("train: ")
    assert "  epochs " in text
    assert "a whole number; default 10" in text
    assert "task adversarial" not in text
    assert "eps" in listing("keys", "task")
    assert "must be given" in listing("keys", "model")
    assert "\ntask.schedule linear: " in listing("keys")


def test_an_unknown_section_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UnknownName, match=r"a recipe has no section 'trian'; did you mean 'train'\? Sections: recipe, "
    ):
        listing("keys", "trian")
    with pytest.raises(ConfigError, match=r"only `vitruvius list keys` takes a section"):
        listing("tasks", "train")


def test_the_page_of_keys_is_up_to_date() -> None:
    path = Path(__file__).parents[1] / "scripts" / "key_table.py"
    spec = importlib.util.spec_from_file_location("key_table", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run: python scripts/key_table.py"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "digits/softmax", "--epochs", "3"], "; write train.epochs=3"),
        (["train", "digits/softmax", "--epochs=3"], "; write train.epochs=3"),
        (["train", "digits/softmax", "--batch-size", "32"], "; write data.batch_size=32"),
        (["train", "digits/softmax", "--seed"], "; write seed=…"),
        (["evaluate", "runs/x", "--batch-size", "32"], "; write data.batch_size=32"),
    ],
)
def test_a_flag_that_is_a_key_is_answered_with_how_to_write_it(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert hint in capsys.readouterr().err


def test_a_flag_that_is_no_key_gets_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", "digits/softmax", "--colour", "red"],
        ["list", "--epochs"],
        ["evaluate", "x", "--epochs", "3"],
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert "write" not in capsys.readouterr().err
    assert find_key("colour") is None


def test_a_model_of_ours_without_its_prefix_is_suggested_with_it() -> None:
    with pytest.raises(UnknownName, match=r"no model named 'vit_digits'; did you mean 'vitruvius/vit_digits'\?"):
        create_model("vit_digits")
