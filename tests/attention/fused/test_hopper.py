"""The kernels for Hopper GPUs without one: their formulas on the CPU, and whether this Triton compiles them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from another_process import answer_of

from vitruvius.attention.fused.hopper import _calls as calls

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_formulas_agree_with_float64_on_the_cpu():
    answer_of("-m", "pytest", "-x", str(HERE / "hopper_on_cpu.py"), str(HERE / "hopper_mask_on_cpu.py"))


def test_they_compile_for_the_gpu_and_hardly_spill():
    table = answer_of("scripts/kernel_resources.py", "--only", "Hopper: rpc")
    rows = [line.split() for line in table.splitlines() if line.startswith("Hopper")]
    assert len(rows) == 2, table
    for row in rows:
        spilled, products, older = (int(row[place]) for place in (-6, -4, -3))
        assert products > 0, table
        assert older == 0, table
        assert spilled <= 256, table


def test_only_a_hopper_gpu_gets_them():
    k = torch.zeros(1, 3, 197, 64, dtype=torch.bfloat16)
    assert not calls.takes(None, k, k, None)
