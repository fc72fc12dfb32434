"""The size of the package and its walls: no package imports a private module of another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
MAX_LINES = 59_000


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


def test_the_package_stays_small_enough_to_live_in() -> None:
    assert script.total(script.measure()).lines <= MAX_LINES


def test_no_package_imports_private_modules_of_another() -> None:
    assert script.private_imports() == []


def test_the_script_sees_what_it_counts(tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "_small.py").write_text("from vitruvius.data import _open\nimport torch\n")
    (tmp_path / "attacks" / "__init__.py").write_text('__all__ = ["A", "B"]\n')
    size = script.measure(tmp_path)["attacks"]
    assert (size.files, size.lines, size.private, size.exported) == (2, 3, 1, 2)
    (tmp_path / "attacks" / "__init__.py").write_text('_, __all__ = exports(__name__, {"A": "a", "B": "b", "C": "b"})')
    assert script.measure(tmp_path)["attacks"].exported == 3
    assert script.private_imports(tmp_path) == ["attacks/_small.py:1 vitruvius.data._open"]
