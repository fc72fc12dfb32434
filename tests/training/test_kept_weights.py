"""`train.keep`: weights of more epochs than the best and the last, also after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_run import assert_same, rows_of, small_run, stopped_run
from vitruvius._files import load_tensors
from vitruvius.training.checkpoint import epochs_to_keep
from vitruvius.training.config import Keep
from vitruvius.training.run_folder import kept_weights

KEEP = ("train.epochs=4", "train.keep={every: 2, best: 1}")


def test_every_so_many_epochs_and_the_best_are_kept(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", *KEEP)
    best = max(rows_of(run), key=lambda row: row["val_accuracy"])["epoch"]  # the first of equals
    assert set(kept_weights(run)) == {2, 4, best + 1}
    assert_same(load_tensors(kept_weights(run)[4]), load_tensors(run / "last.safetensors"))
    assert not (small_run(tmp_path / "plain") / "kept").exists()


def test_the_best_are_chosen_under_attack_where_there_is_one() -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": 0, "val_accuracy": 0.9, "val_robust_accuracy": 0.1},
        {"epoch": 1, "val_accuracy": 0.5, "val_robust_accuracy": 0.4},
        {"epoch": 2},
        {"epoch": 3, "val_accuracy": 0.6, "val_robust_accuracy": 0.3},
    ]
    assert epochs_to_keep(Keep(best=2), rows) == {1, 3}
    assert epochs_to_keep(Keep(best=2), [{"epoch": 4, "val_accuracy": 0.95}, *rows]) == {1, 3}  # eps was still growing
    assert epochs_to_keep(Keep(every=3), rows) == {2}
    assert epochs_to_keep(Keep(), rows) == set()


def test_a_run_that_goes_on_keeps_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_run(tmp_path / "whole", *KEEP)
    stopped_run(monkeypatch, tmp_path / "run", 11, *KEEP)
    run = small_run(tmp_path / "run", *KEEP)
    assert set(kept_weights(run)) == set(kept_weights(whole))
    for epoch, file in kept_weights(run).items():
        assert_same(load_tensors(file), load_tensors(kept_weights(whole)[epoch]))
