"""How readable the tree is: the bounds of scripts/tree_figures.py hold, so that no later change undoes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("radon")
ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "tree_figures.py"
    spec = importlib.util.spec_from_file_location("tree_figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tree_figures"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


script = load_script()
figures = script.measure()


@pytest.mark.parametrize(("room", "bound"), script.MAX_PRIVATE_MODULES.items())
def test_a_room_shows_its_public_pieces_first(room: str, bound: int) -> None:
    private = [name for name in figures.private_modules if name.startswith(f"{room}/")]
    assert len(private) <= bound, private


def test_no_room_imports_private_files_of_another() -> None:
    assert figures.private_imports == []


def test_branches_are_statements_rather_than_conditional_expressions() -> None:
    assert figures.conditionals_per_1000 <= script.MAX_CONDITIONALS_PER_1000
    assert figures.conditionals_per_1000_not_blank <= script.MAX_CONDITIONALS_PER_1000


def test_few_files_are_crumbs() -> None:
    assert len(figures.crumbs) <= script.MAX_CRUMBS, figures.crumbs


def test_no_function_is_too_complex() -> None:
    assert figures.too_complex == []


def test_few_functions_are_short_by_being_packed() -> None:
    assert figures.compressed_percent <= script.MAX_COMPRESSED_PERCENT, figures.compressed


def test_the_script_sees_what_it_counts(tmp_path: Path) -> None:
    """One file with one of each: a private import of another room, a conditional expression, a compressed function."""
    source = tmp_path / "vitruvius"
    (source / "attacks").mkdir(parents=True)
    compressed = "def f(a):\n    return " + " or ".join(["a"] * 11) + "\n"
    lines = ["from vitruvius.data import _open", "from vitruvius.tasks._base import x", "y = 1 if x else 2", compressed]
    (source / "attacks" / "_small.py").write_text("\n".join(lines))
    found = script.measure(source)
    assert found.private_modules == ["attacks/_small.py"]
    assert [place.split()[1] for place in found.private_imports] == ["vitruvius.data._open", "vitruvius.tasks._base"]
    assert len(found.conditionals) == len(found.compressed) == len(found.too_complex) == len(found.crumbs) == 1
    assert found.highest_complexity == 11
