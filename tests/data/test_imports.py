"""What `vitruvius.data` imports: a refusal does not pay for timm and torchvision."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "print(sorted({'torch', 'timm', 'torchvision', 'sklearn'} & set(sys.modules)))"
REFUSED = """
from vitruvius.data import DataConfig, eval_loader
from vitruvius.data.base import DataError
try:
    eval_loader(DataConfig(dataset={dataset!r}, root={root!r}), input_size=(3, 8, 8))
except DataError as error:
    assert {word!r} in str(error), error
else:
    raise AssertionError("not refused")
"""


def heavy_after(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\n{HEAVY}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "imported"),
    [("import vitruvius.data", "[]"), ("import vitruvius.corruptions, vitruvius.shifts", "['torch']")],
)
def test_importing_a_package_is_light(code: str, imported: str) -> None:
    assert heavy_after(code) == imported


@pytest.mark.parametrize(
    ("dataset", "root", "word"),
    [
        ("digts", ".", "did you mean 'digits'"),
        ("folder", "/nowhere", "does not exist"),
    ],
)
def test_a_refusal_needs_neither_timm_nor_torchvision(dataset: str, root: str, word: str) -> None:
    assert heavy_after(REFUSED.format(dataset=dataset, root=root, word=word)) == "['torch']"
