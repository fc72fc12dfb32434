"""`vitruvius list`: every piece with its settings and one line, read from the piece itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitruvius._errors import UnknownName
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.listing import KINDS, find_recipe, listing, plural_of, recipes, rows_of


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_piece_has_a_name_and_one_line(kind: str) -> None:
    rows = rows_of(kind)
    assert rows
    for name, _, doc in rows:
        assert name
        assert doc, f"{kind} {name} has no docstring"
        assert "\n" not in doc
    assert [name for name, _, _ in rows] == sorted(name for name, _, _ in rows)


def test_a_list_shows_names_lines_and_settings() -> None:
    text = listing("attentions")
    assert text.splitlines()[0] == "ATTENTIONS"
    for name in attentions:
        assert f"\n  {name} " in text
    assert "iterations=4" in text
    assert "eps, norm=linf, seed=0, steps=10" in " ".join(listing("attacks").split())


def test_everything_is_listed_at_once() -> None:
    text = listing("all")
    for kind in KINDS:
        assert kind.upper() in text.splitlines()
    assert all(f"  {name} " in text for name in attacks)
    assert max(map(len, text.splitlines())) < 200


def test_without_a_kind_the_kinds_are_listed() -> None:
    text = listing()
    assert all(f"\n  {kind} " in text for kind in (*KINDS, "keys"))


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"nothing called 'atacks' to list; did you mean 'attacks'\? Kinds: analyses"):
        listing("atacks")


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    names = [name for name, _, _ in recipes()]
    assert "digits/softmax" in names
    for name in ("digits/softmax", "digits/softmax.yaml", "recipes/digits/softmax.yaml"):
        assert find_recipe(name).name == "softmax.yaml"
    own = tmp_path / "mine.yaml"
    own.write_text("model: {name: resnet18}")
    assert find_recipe(str(own)) == own


@pytest.mark.parametrize(
    ("singular", "plural"),
    [("attention", "attentions"), ("analysis", "analyses"), ("basis", "bases"), ("study", "studies"), ("data", "data")],
)
def test_a_kind_may_be_named_in_the_singular(singular: str, plural: str) -> None:
    assert plural_of(singular) == plural_of(plural) == plural


def test_every_kind_is_known_without_its_last_letter() -> None:
    assert [plural_of(kind.removesuffix("s")) for kind in KINDS] == list(KINDS)
    assert listing("tracker") == listing("trackers")
