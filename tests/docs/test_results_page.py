"""The page of results says what the files of results/ say."""

from __future__ import annotations

import base64
import runpy
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "results.py"))


def threat(bits: list[int]) -> dict[str, object]:
    return {"n": len(bits), "correct": base64.b64encode(np.packbits(np.array(bits, np.uint8)).tobytes()).decode()}


def test_every_table_is_made_from_the_results() -> None:
    page = (ROOT / "docs" / "RESULTS.md").read_text()
    assert SCRIPT["with_tables"](page) == page


def test_runs_are_compared_image_by_image() -> None:
    one, other = threat([1, 1, 1, 1, 0, 0, 1, 1, 1]), threat([0, 0, 0, 1, 0, 0, 0, 0, 1])
    difference, p = SCRIPT["paired"](one, other)
    assert difference == 5 / 9
    assert p == 2 / 2**5  # five discordant images, all on one side
    assert SCRIPT["paired"](one, one) == (0.0, 1.0)


def test_runs_without_single_answers_are_compared_by_their_accuracies() -> None:
    one, other = {"accuracy": 0.8, "n": 100}, {"accuracy": 0.6, "n": 100}
    difference, p = SCRIPT["unpaired"](one, other)
    assert round(difference, 12) == 0.2
    assert abs(p - 0.00203) < 5e-5  # z = 0.2 / sqrt(0.7 · 0.3 · 2 / 100) = 3.086
    assert SCRIPT["unpaired"](one, one)[1] == 1.0
