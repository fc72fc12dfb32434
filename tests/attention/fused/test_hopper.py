"""The kernels for Hopper GPUs without one: their formulas on the CPU, and whether this Triton compiles them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitruvius.attention.fused import _hopper_calls as calls
from vitruvius.attention.fused import _on_hopper

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=HERE.parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_formulas_agree_with_float64_on_the_cpu():
    run("-m", "pytest", "-x", str(HERE / "hopper_on_cpu.py"))


def test_they_compile_for_the_gpu_and_hardly_spill():
    table = run("scripts/kernel_resources.py", "--only", "Hopper")
    rows = [line.split() for line in table.splitlines() if line.startswith("Hopper")]
    assert len(rows) >= 2, table
    for row in rows:
        spilled, products, older = (int(row[place]) for place in (-6, -4, -3))
        assert products > 0, table
        assert older == 0, table
        assert spilled <= 256, table


def test_only_a_hopper_gpu_gets_them():
    k = torch.zeros(1, 3, 197, 64, dtype=torch.bfloat16)
    assert not calls.takes(None, k, k, None)


def test_a_triton_that_cannot_compile_them_is_told_once_and_not_asked_again(monkeypatch):
    monkeypatch.setattr(_on_hopper, "_wanted", True)
    with pytest.warns(UserWarning, match="do not compile with Triton .*: no such layout; the general ones"):
        _on_hopper.given_up(RuntimeError("no such layout\nand more"))
    assert not _on_hopper._wanted
    with pytest.raises(torch.OutOfMemoryError):
        _on_hopper.given_up(torch.OutOfMemoryError("full"))
