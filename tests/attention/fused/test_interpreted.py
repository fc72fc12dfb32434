"""The kernels run on the CPU under Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("half", ["rpc", "not rpc"])
def test_kernels_agree_with_float64_under_the_interpreter(half):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-k", half, str(HERE / "interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
