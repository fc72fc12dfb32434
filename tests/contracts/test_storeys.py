"""The storeys of the house: imports go downwards only, and materials never see timm."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = ("surgery", "models", "data", "tasks", "training", "converters")  # the rooms that may import timm


def test_imports_keep_to_the_storeys() -> None:
    """In a process of its own: the linter silences every logger that exists."""
    pytest.importorskip("importlinter")
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_timm_has_few_doors() -> None:
    source = ROOT / "src" / "vitruvius"
    importing = {
        path.relative_to(source).parts[0].removesuffix(".py")
        for path in source.rglob("*.py")
        if any(line.startswith(("import timm", "from timm")) for line in path.read_text().splitlines())
    }
    assert importing <= set(DOORS)


def test_devices_and_sizes_are_nobodys_business() -> None:
    """Neither the name of a device nor the number of tokens of one model at one size is written into the library."""
    for path in (ROOT / "src" / "vitruvius").rglob("*.py"):
        if path.parent.name == "fused":  # kernels for one kind of device
            continue
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not {"cuda", 196, 197} & constants, path
