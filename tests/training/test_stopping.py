"""Runs that end early: a signal, a full disk, a loss that is no number; what was saved is whole, and they resume."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from failing_disk import fill_the_disk
from small_run import assert_same_run, contents, rows_of, small_config, small_run, state_of, stopped_run
from two_processes import in_two_processes
from vitruvius._errors import Diverged, Preempted, RunError
from vitruvius._processes import Process
from vitruvius.tasks.supervised import Supervised
from vitruvius.training import train
from vitruvius.training.loop import Trainer
from vitruvius.training.losses import LossWatch, Means
from vitruvius.training.run_folder import verify_checksum
from vitruvius.training.selection import Selection

ACCUMULATED = ("train.grad_accum_steps=3", "train.model_ema=true", "data.mixup=0.4")
RISING = (
    "task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 1}, schedule: {use: linear, epochs: 2, per: update}}",
)


def at_batch(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What the task answers to the so-many-th batch goes through `do`."""
    forward, seen = Supervised.forward, 0

    def changed(self: Any, x: Any, y: Any) -> Any:
        nonlocal seen
        seen += 1
        result = forward(self, x, y)
        return do(result) if seen == number else result

    monkeypatch.setattr(Supervised, "forward", changed)


def signal_in_batch(monkeypatch: pytest.MonkeyPatch, number: int, which: signal.Signals) -> None:
    """Somebody sends a signal while the so-many-th batch is on its way."""
    at_batch(monkeypatch, number, lambda result: os.kill(os.getpid(), which) or result)  # type: ignore[func-returns-value]


def poison(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The loss of the so-many-th batch is not a number, and neither are its gradients."""
    at_batch(monkeypatch, number, lambda result: {**result, "loss": result["loss"] * math.nan})


@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 85)], ids=str)
def test_a_signal_lets_the_update_finish_saves_and_leaves(
    which: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, unbroken = signal.getsignal(which), small_run(tmp_path / "unbroken", *ACCUMULATED)
    with monkeypatch.context() as patch:
        signal_in_batch(patch, 2, which)
        with pytest.raises(Preempted, match=rf"{which.name}: saved at update 1 in .*run; the same") as caught:
            small_run(tmp_path / "run", *ACCUMULATED)
    assert caught.value.exit_code == code  # 85: the time is nearly over, put the job back
    assert state_of(tmp_path / "run")["batch"] == 3  # the update's third batch was still trained on
    assert signal.getsignal(which) is before
    small_run(tmp_path / "run", *ACCUMULATED)
    assert_same_run(tmp_path / "run", unbroken)


def test_a_signal_while_the_held_out_images_are_judged_saves_the_epoch_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = small_run(tmp_path / "unbroken", *RISING)
    judge = Selection.judge

    def interrupted(self: Selection, *arguments: Any, **settings: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return judge(self, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Selection, "judge", interrupted)
        with pytest.raises(Preempted, match="SIGTERM: saved at update 4 in"):
            small_run(tmp_path / "run", *RISING)
    assert (state_of(tmp_path / "run")["epoch"], state_of(tmp_path / "run")["batch"]) == (0, 4)
    small_run(tmp_path / "run", *RISING)
    assert_same_run(tmp_path / "run", unbroken)


def test_workers_that_died_of_the_same_signal_do_not_claim_a_state_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(self: Any, x: Any, y: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a data worker was terminated")

    monkeypatch.setattr(Supervised, "forward", dying)
    with pytest.raises(Preempted, match="SIGTERM: nothing was saved yet; the same command starts again"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_saving_by_the_clock_changes_nothing(tmp_path: Path) -> None:
    plain = small_run(tmp_path / "plain")
    often = small_run(tmp_path / "often", "train.save_minutes=1e-9")
    assert_same_run(often, plain)


def _signalled(rank: int, out: str) -> None:
    config = small_config(Path(out), "data.batch_size=4", "train.epochs=3")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            signal_in_batch(patch, 2, signal.SIGTERM)
        with pytest.raises(Preempted, match="saved at update 4"):
            train(config, quiet=True)


def test_several_processes_leave_together_when_one_is_asked(tmp_path: Path) -> None:
    in_two_processes(_signalled, str(tmp_path / "run"))
    assert state_of(tmp_path / "run")["processes"] == 2


def test_a_loss_that_is_no_number_stops_with_its_images_and_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, good = tmp_path / "run", small_run(tmp_path / "good")
    with monkeypatch.context() as patch:
        poison(patch, 6)
        with pytest.raises(Diverged, match=r"loss is nan at batch 2 of epoch 2 \(images \d+, .*Lower train.lr"):
            small_run(run)
    note = json.loads((run / "nonfinite.json").read_text())
    assert (note["epoch"], note["batch"], note["updates"], len(note["ids"])) == (1, 1, 5, 8)
    state = verify_checksum((run / "nonfinite.pt").read_bytes())
    assert state["updates"] == 5
    assert all(torch.isfinite(value).all() for value in state["model"].values())  # alone on a CPU: from before it
    assert len(rows_of(run)) == 1
    small_run(run)  # goes on from the last good state
    for name in ("nonfinite.json", "nonfinite.pt"):
        (run / name).unlink()
    assert_same_run(run, good)


def test_a_run_that_never_saved_keeps_the_record_of_its_explosion(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        small_run(tmp_path / "run", "train.opt=sgd", "train.lr=1e30")
    assert {"config.yaml", "nonfinite.json", "nonfinite.pt"} == set(contents(tmp_path / "run"))


@pytest.mark.parametrize("every", [1, 2])
def test_a_spoilt_update_is_left_out_and_counted(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[torch.Tensor] = []
    update = Trainer.update

    def noting(self: Trainer) -> None:
        update(self)
        weights.append(self.session.model.model.head.weight.detach().clone())

    monkeypatch.setattr(Trainer, "update", noting)
    poison(monkeypatch, 3)
    rows = rows_of(small_run(tmp_path / "run", "train.nonfinite=skip", f"train.grad_accum_steps={every}"))
    assert [row["skipped_updates"] for row in rows] == [1, 0]
    assert all(math.isfinite(row["train_loss"]) for row in rows)
    spoilt = 2 // every
    assert torch.equal(weights[spoilt], weights[spoilt - 1])
    assert not torch.equal(weights[spoilt + 1], weights[spoilt])


def test_gradients_that_are_no_numbers_are_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steep(result: dict[str, Any]) -> dict[str, Any]:
        """A finite loss with an endless slope: sqrt at 0."""
        return {**result, "loss": result["loss"] + (result["output"] * 0).sum().abs().sqrt()}

    at_batch(monkeypatch, 2, steep)
    rows = rows_of(small_run(tmp_path / "run", "train.nonfinite=skip"))
    assert [row["skipped_updates"] for row in rows] == [1, 0]


def test_the_first_suspect_is_found_among_many() -> None:
    suspects = LossWatch(Process(device=torch.device("cpu")))
    for number in range(5):
        loss = torch.tensor(math.inf if number in (2, 4) else 1.0)
        suspects.add(number, loss, torch.tensor([10 * number, 10 * number + 1]))
    assert suspects.find() == {"batch": 2, "loss": "inf", "rank": 0, "ids": [20, 21]}
    assert suspects.find() is None


class OneOfTwo(Process):
    """The first of two processes, of which the other has seen a loss that is no number at batch 3."""

    def gather(self, value: Any) -> list[Any]:
        return [value, {"batch": 3, "loss": "nan", "rank": 1, "ids": [7]}]


@pytest.mark.parametrize(("number", "rank"), [(2, 0), (3, 0), (4, 1)])
def test_of_several_processes_the_first_suspect_of_all_is_named(number: int, rank: int) -> None:
    suspects = LossWatch(OneOfTwo(device=torch.device("cpu")))
    suspects.add(number, torch.tensor(math.inf), torch.tensor([1]))
    found = suspects.find()
    assert found is not None
    assert (found["batch"], found["rank"]) == (min(number, 3), rank)


def test_means_are_over_images_whatever_their_batches() -> None:
    means = Means(Process(device=torch.device("cpu")))
    for loss, images in ((1.0, 1), (4.0, 3)):
        means.add({"loss": torch.tensor(loss)}, images)
    assert means.read() == {"loss": 3.25, "images": 4.0}


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
