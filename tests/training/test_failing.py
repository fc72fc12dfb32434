"""When something fails on the way: a full disk, no permission, a loss that is no number, a hand on the plug."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest

from failing_disk import fill_the_disk
from small_run import contents, rows_of, small_run, state_of
from vitruvius._errors import Diverged, RunError
from vitruvius.training import _epoch


def test_no_permission_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch, after=0, number=errno.EACCES)
    with pytest.raises(RunError, match=r"cannot write to .*run: no permission. Choose another folder"):
        small_run(tmp_path / "run")
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize("files", range(3))
def test_a_disk_that_fills_up_leaves_the_previous_files(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second epoch so many more files fit: of state, last and metrics each is the old one or the new, whole."""
    run, update, seen = tmp_path / "run", _epoch._update, 0

    def counting(session: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            fill_the_disk(monkeypatch, after=files)
        update(session)

    monkeypatch.setattr(_epoch, "_update", counting)
    with pytest.raises(RunError, match=r"cannot write .*: the disk is full. What was there before is intact"):
        small_run(run)
    monkeypatch.undo()
    names = {path.name for path in run.iterdir()}
    assert names == {"config.yaml", "state.pt", "last.safetensors", "best.safetensors", "metrics.jsonl"}
    assert len(rows_of(run)) == 1
    assert state_of(run)["epoch"] == (2 if files else 1)
    small_run(run)
    assert len(rows_of(run)) == 2


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step, seen = tmp_path / "run", _epoch._step, 0
    good: dict[str, bytes] = {}

    def poisoned(session: Any, *rest: Any) -> Any:
        nonlocal seen
        seen += 1
        numbers = step(session, *rest)
        if seen == 6:
            good.update(contents(run))
            numbers["loss"] = numbers["loss"] * math.nan
        return numbers

    monkeypatch.setattr(_epoch, "_step", poisoned)
    with pytest.raises(Diverged, match=r"the training loss is nan at batch 4 of epoch 2. Lower train.lr"):
        small_run(run)
    assert contents(run) == good
    assert len(rows_of(run)) == 1


def test_weights_that_the_last_update_spoilt_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = _epoch._update

    def spoiling(session: Any) -> None:
        update(session)
        if session.updates == 4:
            next(session.model.parameters()).data.fill_(math.inf)

    monkeypatch.setattr(_epoch, "_update", spoiling)
    with pytest.raises(Diverged, match="weights are no longer finite after epoch 1"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_real_explosion_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        small_run(tmp_path / "run", "train.opt=sgd", "train.lr=1e30")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_before_its_first_epoch_takes_its_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_epoch, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
