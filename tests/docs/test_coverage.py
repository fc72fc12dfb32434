"""docs/coverage.md says of every feature where it is or why it is not, and the names it uses exist."""

from __future__ import annotations

import re
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import pytest

from vitruvius._registry import Registry, parse_spec, signature_of
from vitruvius.analysis import analyses
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.cli import make_app
from vitruvius.compression.rules import rules
from vitruvius.data.base import data_sources
from vitruvius.data.sources.torchvision import SETS
from vitruvius.init import bases, inits
from vitruvius.listing import recipes, recipes_folder
from vitruvius.models import models
from vitruvius.recipe_keys import Key, sections
from vitruvius.studies import studies
from vitruvius.tasks import tasks
from vitruvius.tracking import trackers

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| feature")]
PIECES: tuple[Registry[Any], ...] = (analyses, attacks, attentions, rules, inits, bases, tasks, trackers)
RECIPES = [name for name, _, _ in recipes()] + [
    str(path.relative_to(recipes_folder()).with_suffix("")) for path in recipes_folder().rglob("*.yaml")
]
WORDS = {  # what is neither a piece, a key, a verb nor a recipe: files, flags, extras, functions
    "load_model", "metrics.jsonl", "rows.jsonl", "validation=", "analyses:", "tracking:", "cloud", "slurm", "paper",
    "compression.cost.account", "compression.cost", "report.sections.maps.draw_accuracy", "analysis.shipped",
}  # fmt: skip


APP = make_app()
NAMES = sorted(
    {word for row in ROWS for word in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1]) if not word.startswith("--")}
    - WORDS
)


def test_every_feature_is_ticked_or_named_as_left_out() -> None:
    assert len(ROWS) > 100
    for row in ROWS:
        feature, here = (cell.strip() for cell in row.strip("| ").split(" | ", 1))
        assert here.startswith(("✓ ", "— ")), row
        assert feature
    for number in range(1, 26):
        assert any(row.startswith(f"| F{number} ") for row in ROWS), f"F{number}"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_names_exists(name: str) -> None:
    word = name.split()[0]
    if word == "vitruvius":
        word = name.split()[1]
    if word in APP:
        _check_command(name.removeprefix("vitruvius ").split())
        return
    section, dot, key = name.partition(".")
    if dot and section in ("train", "data", "model", "task", "attention"):
        assert key in {one.name for one in _keys(section)}, name
    elif name.startswith("vitruvius/"):
        assert matching(list(models), name)
    elif "/" in name and name.split("/")[0] in {path.name for path in recipes_folder().iterdir()}:
        assert matching(RECIPES, name)
    elif name.startswith("torch/"):
        assert name.removeprefix("torch/") in SETS
    elif name.split("/")[0] not in data_sources:
        _check_piece(name)


def _check_command(words: list[str]) -> None:
    """A verb, its flags, and which study or list."""
    flags = {argument.name for argument in APP[words[0]].assemble_argument_collection()}
    assert {word for word in words if word.startswith("--")} <= flags, words
    if words[0] == "study":
        assert words[1] in studies


def _keys(section: str) -> list[Key]:
    return [key for part in sections(section).values() for key in part.keys]


def _check_piece(name: str) -> None:
    piece, settings = parse_spec(name, where="coverage")
    room = next((room for room in PIECES if piece in room), None)
    assert room is not None, f"nothing is called {piece!r}"
    known = signature_of(room[piece])
    assert all(re.search(rf"\b{key}\b", known) for key in settings), name
