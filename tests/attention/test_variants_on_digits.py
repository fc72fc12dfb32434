"""Every attention trains on the digits by one line of a recipe."""

import pytest

from small_run import rows_of, small_run
from vitruvius.attention import attentions

PATTERNS = ("mask", "sparse_softmax")  # which need a pattern: compress_digits trains with one
NAMES = [n for n in attentions if attentions[n].__module__.startswith("vitruvius.") and n not in PATTERNS]


@pytest.mark.parametrize("name", NAMES)
def test_one_line_of_the_recipe_is_enough(name, tmp_path):
    run = small_run(tmp_path / name, f"attention=[{{where: '*', parts: [{name}]}}]", "train.epochs=1")
    (row,) = rows_of(run)
    assert row["train_loss"] > 0
