"""What `vitruvius.data` imports: a refusal does not pay for timm and torchvision."""

from __future__ import annotations

import subprocess
import sys

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


def test_importing_the_package_is_light() -> None:
    assert heavy_after("import vitruvius.data") == "[]"


def test_refusals_corruptions_and_shifts_need_neither_timm_nor_torchvision() -> None:
    """In one process: what one of them imported the others would show."""
    misspelt = REFUSED.format(dataset="digts", root=".", word="did you mean 'digits'")
    missing = REFUSED.format(dataset="folder", root="/nowhere", word="does not exist")
    assert heavy_after(f"import vitruvius.corruptions, vitruvius.shifts\n{misspelt}\n{missing}") == "['torch']"
