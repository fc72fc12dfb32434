"""The kernels run on the CPU under Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from another_process import answer_of, start

HERE = Path(__file__).parent
NO_LOOPS = "only 0-dimensional arrays can be converted to Python scalars"  # Triton 3.6 with NumPy 2.4
SOON_NO_LOOPS = "ignore:Conversion of an array:DeprecationWarning"  # the same Triton with an older NumPy


@pytest.fixture(scope="module")
def _loops():
    """Skip where Triton's interpreter cannot run any loop with this NumPy; all else that fails is ours to hear of."""
    if NO_LOOPS in start(str(HERE / "counting.py"), TRITON_INTERPRET="1").stderr:
        pair = f"Triton {version('triton')} with NumPy {version('numpy')}"
        pytest.skip(f"the interpreter of {pair} cannot run a loop: {NO_LOOPS}")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.usefixtures("_loops")
def test_kernels_agree_with_float64_under_the_interpreter():
    answer_of("-m", "pytest", "-x", "-W", SOON_NO_LOOPS, str(HERE / "interpreted.py"), TRITON_INTERPRET="1")
