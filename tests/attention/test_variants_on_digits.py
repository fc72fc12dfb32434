"""An attention trains on the digits by one line of a recipe; every one trains on the families."""

import pytest

from small_run import rows_of, small_run


@pytest.mark.parametrize("name", ["rpc", "low_rank", "gated", "tome"])
def test_one_line_of_the_recipe_is_enough(name, tmp_path):
    run = small_run(tmp_path / name, f"attention=[{{where: '*', parts: [{name}]}}]", "train.epochs=1")
    (row,) = rows_of(run)
    assert row["train_loss"] > 0
