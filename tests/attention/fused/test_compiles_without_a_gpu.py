"""The kernels for Hopper GPUs compile for a GPU that is not there, also where nothing is clipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "scripts" / "kernel_resources.py"


@pytest.mark.long
@pytest.mark.parametrize("sparsity", ["1", "inf"])
def test_robust_attention_compiles_for_hopper_with_any_sparsity(sparsity: str) -> None:
    command = [sys.executable, str(SCRIPT), "--tokens", "70", "--only", "Hopper: rpc", "--sparsity", sparsity]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("Hopper: rpc")]
    assert len(rows) == 2, done.stdout  # forward and backward
