"""Two processes train as one with their batches put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_run import rows_of, small_config, small_run, state_of
from two_processes import in_two_processes
from vitruvius._errors import RunError
from vitruvius.training import train

SETTINGS = ("train.opt=sgd", "train.lr=0.05", "train.model_ema=true", "train.clip_grad=1.0", "data.pad=1")


def _train(rank: int, out: str, *overrides: str) -> None:
    train(small_config(Path(out), "data.batch_size=4", *SETTINGS, *overrides), quiet=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_reproduce_one_with_the_same_global_batch(accumulate: int, tmp_path: Path) -> None:
    more = f"train.grad_accum_steps={accumulate}"
    one = small_run(tmp_path / "one", *SETTINGS, more)
    in_two_processes(_train, str(tmp_path / "two"), more)
    two = tmp_path / "two"
    for ours, theirs in zip(rows_of(two), rows_of(one), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["train_accuracy"] == pytest.approx(theirs["train_accuracy"])
        assert ours["val_accuracy"] == theirs["val_accuracy"]  # every held-out image once
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
    assert state_of(two)["processes"] == 2
    for key in ("model", "ema"):
        torch.testing.assert_close(state_of(two)[key], state_of(one)[key], rtol=1e-4, atol=1e-6)


def _refused(rank: int, out: str) -> None:
    with pytest.raises(RunError, match="holds a run of another recipe: seed was 0, now 1"):
        _train(rank, out, "train.epochs=1", "seed=1")


def test_an_error_of_the_first_process_ends_both(tmp_path: Path) -> None:
    in_two_processes(_train, str(tmp_path / "run"), "train.epochs=1")
    in_two_processes(_refused, str(tmp_path / "run"))
