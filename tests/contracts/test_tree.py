"""The size of the package, and its layers: who imports whom, and who sees timm."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vitruvius"
MAX_LINES, MAX_FILES, MAX_NAMES = 48_300, 329, 159
DOORS = {"surgery", "models", "data", "tasks", "training", "converters"}  # the packages that may import timm


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


script, architecture, mutants = map(load_script, ("tree_figures", "architecture", "mutants"))


def test_the_package_stays_small_enough_to_live_in() -> None:
    size = script.total(script.measure())
    assert size.lines <= MAX_LINES
    assert size.files <= MAX_FILES
    assert size.exported <= MAX_NAMES


def test_no_package_imports_private_modules_of_another() -> None:
    assert script.private_imports() == []


def test_imports_keep_to_the_layers() -> None:
    """In a process of its own: the linter silences every logger that exists."""
    pytest.importorskip("importlinter")
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_timm_has_few_doors_and_nobody_names_a_device_or_the_tokens_of_one_model() -> None:
    for path in SOURCE.rglob("*.py"):
        text, inside = path.read_text(encoding="utf-8"), path.relative_to(SOURCE)
        assert inside.parts[0] in DOORS or not re.search("^(import|from) timm", text, re.MULTILINE), inside
        if path.parent.name != "fused":  # kernels for one kind of device
            constants = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
            assert not {"cuda", 196, 197} & constants, inside


def test_the_page_of_the_architecture_names_files_that_exist_and_its_picture_shows_them() -> None:
    training, attacked = architecture.ways()
    assert len(training) + len(attacked) >= 18
    for _, package, files in training + attacked:
        for name in re.findall(r"`([^`]+)`", files):
            assert (SOURCE / package / name).exists(), f"docs/architecture.md names {package}/{name}"
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.picture(), "run scripts/architecture.py"


def test_the_script_sees_what_it_counts(tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "_small.py").write_text("from vitruvius.data import _open\nimport torch\n")
    (tmp_path / "attacks" / "__init__.py").write_text('__all__ = ["A", "B"]\n')
    size = script.measure(tmp_path)["attacks"]
    assert (size.files, size.lines, size.private, size.exported) == (2, 3, 1, 2)
    (tmp_path / "attacks" / "__init__.py").write_text(
        "if TYPE_CHECKING:\n    from a import A, B\n    from b import C\n"
    )
    assert script.measure(tmp_path)["attacks"].exported == 3
    assert script.private_imports(tmp_path) == ["attacks/_small.py:1 vitruvius.data._open"]


def test_every_mutant_changes_a_line_that_is_there_and_names_tests_that_exist() -> None:
    for mutant in mutants.MUTANTS:
        assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.before) == 1, mutant.name
        assert all((ROOT / test).exists() for test in mutant.tests.split()), mutant.name
