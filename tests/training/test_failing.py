"""When something fails on the way: a full disk, no permission, a loss that is no number, a hand on the plug."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest

from failing_disk import fill_the_disk
from small_run import rows_of, small_run, state_of, stopped_run
from vitruvius._errors import Diverged, RunError
from vitruvius.training.loop import Trainer


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
    run, update, seen = tmp_path / "run", Trainer.update, 0

    def counting(self: Trainer) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            fill_the_disk(monkeypatch, after=files)
        update(self)

    monkeypatch.setattr(Trainer, "update", counting)
    with pytest.raises(RunError, match=r"cannot write .*: the disk is full. What was there before is intact"):
        small_run(run)
    monkeypatch.undo()
    names = {path.name for path in run.iterdir()}
    assert names - {"state.previous.pt"} == {
        "config.yaml",
        "state.pt",
        "last.safetensors",
        "best.safetensors",
        "metrics.jsonl",
    }
    assert len(rows_of(run)) == 1
    assert state_of(run)["epoch"] == (2 if files else 1)
    small_run(run)
    assert len(rows_of(run)) == 2


def test_weights_that_the_last_update_spoilt_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer.update

    def spoiling(self: Trainer) -> None:
        update(self)
        if self.session.updates == 4:
            next(self.session.model.parameters()).data.fill_(math.inf)

    monkeypatch.setattr(Trainer, "update", spoiling)
    with pytest.raises(Diverged, match="weights are no longer finite after epoch 1"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_before_its_first_epoch_takes_its_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(monkeypatch, tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    stopped_run(monkeypatch, tmp_path / "run", 1)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
