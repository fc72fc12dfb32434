"""`vitruvius list`: every piece with its settings and one line, read from the piece itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitruvius._errors import ConfigError, UnknownName
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.listing import (
    INDEX,
    KINDS,
    Index,
    Registries,
    find_recipe,
    listing,
    piece_files,
    plural_of,
    recipes,
    source_of_pieces,
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_piece_has_a_name_and_one_line(kind: str) -> None:
    rows = KINDS[kind]()
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
    assert max(map(len, listing().splitlines())) < 200


def test_everything_is_listed_at_once() -> None:
    text = listing()
    for kind in KINDS:
        assert kind.upper() in text.splitlines()
    assert all(f"  {name} " in text for name in attacks)


def test_a_list_imports_only_what_it_shows() -> None:
    code = (
        "import sys; from vitruvius.listing import listing; print(listing('recipes')); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "digits/softmax" in done.stdout
    code = "import sys; from vitruvius.listing import listing; listing('trackers'); sys.exit('timm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    with pytest.raises(ConfigError, match=r"no recipe at digits/sofmax; did you mean 'digits/softmax'\?"):
        find_recipe("digits/sofmax")


@pytest.mark.parametrize(
    ("singular", "plural"),
    [("attention", "attentions"), ("analysis", "analyses"), ("basis", "bases"), ("study", "studies"), ("data", "data")],
)
def test_a_kind_may_be_named_in_the_singular(singular: str, plural: str) -> None:
    assert plural_of(singular) == plural_of(plural) == plural


def test_every_kind_is_known_without_its_last_letter() -> None:
    assert [plural_of(kind.removesuffix("s")) for kind in KINDS] == list(KINDS)
    assert listing("tracker") == listing("trackers")


COUNT_TORCH = """
import sys
from vitruvius.cli import main
sys.exit(main(["list", *sys.argv[1:]]) or "torch" in sys.modules)
"""


def list_in_shell(*words: str, folder: Path | None = None) -> tuple[str, bool]:
    """What `vitruvius list` prints in a process of its own, and whether it imported PyTorch."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, "-c", COUNT_TORCH, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout, bool(done.returncode)


def test_a_list_needs_no_pytorch_from_the_first_call_on() -> None:
    text, imported = list_in_shell()
    assert not imported
    assert all(kind.upper() in text.splitlines() for kind in KINDS)
    text, imported = list_in_shell("keys", "train")
    assert not imported
    assert text.startswith("train: ")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_index_says_what_the_pieces_say(kind: str) -> None:
    """Else: `python scripts/listing_index.py`."""
    shipped = Index(INDEX.read_text(encoding="utf-8")).rows(kind)
    live = Registries().rows(kind)
    if kind == "sockets":  # whose modules move with timm's versions; those of transformers are there if it is
        shipped = [(name, "", line) for name, _, line in shipped]
        live = [(name, "", line) for name, _, line in live]
        if importlib.util.find_spec("transformers") is None:
            shipped = [row for row in shipped if not row[0].startswith("transformers")]
    assert shipped == live


def test_the_index_knows_every_key_and_every_file_of_pieces() -> None:
    """Else: `python scripts/listing_index.py`."""
    index = Index(INDEX.read_text(encoding="utf-8"))
    assert index.keys() == Registries().keys()
    assert index.known["files"] == piece_files()


def test_a_file_dropped_into_a_room_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # as in a process that has just begun
    assert isinstance(source_of_pieces(), Index)
    monkeypatch.setattr("vitruvius.listing.piece_files", lambda: [*piece_files(), "attention/mine.py"])
    assert isinstance(source_of_pieces(), Registries)


def test_pieces_of_an_installed_plugin_are_listed(tmp_path: Path) -> None:
    (tmp_path / "some_plugin.py").write_text(
        'def keep_half(sums):\n    """Keep every second pair."""\n    return sums\n'
    )
    facts = tmp_path / "some_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[vitruvius.rules]\nhalf = some_plugin:keep_half\n")
    text, imported = list_in_shell("rules", folder=tmp_path)
    assert imported
    assert "Keep every second pair." in text


def test_what_this_process_has_registered_is_listed() -> None:
    assert isinstance(source_of_pieces(), Registries), "PyTorch is imported here"
