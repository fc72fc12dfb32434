"""scripts/gpu_tests.py: which tests it runs, and what becomes of those that pass, fail, hang, crash or cannot load."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_tests.py"
TESTS = """
import os, time, pytest

pytestmark = pytest.mark.gpu


@pytest.mark.kernels("alike")
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n):
    pass


def test_fails():
    assert 1 == 2


def test_hangs():
    time.sleep(100)


def test_kills_its_process():
    os._exit(3)


def test_skips():
    pytest.skip("not here")
"""


def marks_a_gpu_test(path: Path) -> bool:
    """Whether `pytest.mark.gpu` stands in the code of a file, not only in a string."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu" for node in nodes)


def test_every_file_with_a_gpu_test_is_run() -> None:
    spec = importlib.util.spec_from_file_location("gpu_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tests"] = script  # its dataclasses look their module up
    spec.loader.exec_module(script)
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marks_a_gpu_test(path)}
    assert marked == set(script.PATHS)


@pytest.mark.long
def test_every_fate_is_told_and_written_and_none_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "test_several.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    kernels(key)\n")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(SCRIPT), "--processes", "1", "--limit", "2", "--seconds", "60"]
    done = subprocess.run(
        [*command, "--results", str(results), "."], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["name"].partition("::")[2] or row["name"]: row["fate"] for row in rows} == {
        "test_broken.py": "failed",
        "test_passes[1]": "passed",
        "test_passes[2]": "passed",
        "test_fails": "failed",
        "test_hangs": "timed out",
        "test_kills_its_process": "crashed",
        "test_skips": "skipped",
    }
    assert done.returncode == 1
    assert "assert 1 == 2" in done.stdout
    assert "no_such_module" in done.stdout
