"""The words of the field: no private metaphors in names, docstrings, errors and help, and no word for word German.

CONVENTIONS, rule 4: a reader of timm, RobustBench or PyTorch need not translate. What the old words have become is in
the lists, so that an error here says what to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "vitruvius").rglob("*.py"))
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "RESULTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.yaml")),
]
NAMES = {  # parts of an identifier → what the field says
    "siege": "cascade or ensemble",
    "storm": "run",
    "luck": "rng, seed",
    "spoken": "format",
    "heard": "broadcast",
    "fallen": "broken",
    "felled": "broken",
    "crookedness": "gradient_misalignment",
    "spoilt": "non-finite",
    "posture": "model_mode",
    "wish": "options",
}
OLD_NAMES = {"fallen", "fallen_by"}  # of AutoAttack's outcome: they work for one release, with a warning
PHRASES = {  # in sentences → what an engineer writes
    r"\b(siege|storm(s|ed|ing)?|luck|spoilt|felled|crookedness)\b": "the words of the field, see NAMES",
    r"(?<!there )\b(is|are) no (whole|number|name|file|folder|list|mapping|image|model|key)\b": "is not a …",
    r"\bone (row|line|number|column|file|map|mask|tensor|process|filter|batch) an? (?!time|row)\w+": "one … per …",
    r"\bcannot be had\b": "is not available",
    r"[Ll]eave (\S+ ){1,3}away\b": "omit …",
    r"\ban? (image|head|second|epoch|worker|site) and (threat|head|part)\b": "per …",
    r"\bimages a second\b": "images per second",
}


def strings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, messages and help: every string that is not a key of an old name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What is defined: functions, classes, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def parts_of(name: str) -> list[str]:
    """`StormAgain` and `storm_again` have the same parts."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def test_names_are_words_of_the_field() -> None:
    found = []
    for path in SOURCES:
        for line, name in names_of(ast.parse(path.read_text(encoding="utf-8"))):
            for part in parts_of(name):
                if part in NAMES and name not in OLD_NAMES:
                    found.append(f"{path.relative_to(ROOT)}:{line} {name}: write {NAMES[part]}")
    assert found == []


def test_texts_in_the_code_are_plain_english() -> None:
    found = []
    for path in SOURCES:
        for line, text in strings_of(ast.parse(path.read_text(encoding="utf-8"))):
            found += [f"{path.relative_to(ROOT)}:{line}: {fault}" for fault in faults_in(text)]
    assert found == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plain_english(page: Path) -> None:
    assert faults_in(page.read_text(encoding="utf-8")) == []


def faults_in(text: str) -> list[str]:
    """Every phrase that is not English as it is written, with what to write."""
    joined = " ".join(text.split())
    faults = []
    for phrase, better in PHRASES.items():
        faults += [f"{match[0]!r}: write {better}" for match in re.finditer(phrase, joined)]
    return faults


def test_the_lists_find_what_they_are_for() -> None:
    assert parts_of("StormAgain") == parts_of("storm_again") == ["storm", "again"]
    for text in ("3.5 is no whole number", "one row an image", "cannot be had", "Leave --severities away", "a storm"):
        assert faults_in(text), text
    for text in ("there is no longer", "one at a time", "one row per image", "brainstorm"):
        assert not faults_in(text), text
