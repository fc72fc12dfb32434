"""Exact resume: stopped anywhere, a run ends bit for bit as if it had never been stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from small_run import (
    Stop,
    assert_same,
    assert_same_run,
    rows_of,
    small_run,
    small_session,
    state_of,
    stop_at,
    stopped_run,
)
from vitruvius._errors import RunError
from vitruvius._files import save_tensors
from vitruvius.tasks.base import tasks
from vitruvius.tasks.supervised import Supervised
from vitruvius.training.checkpoint import capture, restore
from vitruvius.training.loop import Trainer
from vitruvius.training.run_folder import Run

LIVELY = (  # everything with a memory: average, momentum, dice of layers and of mixup, a schedule with warm-up
    "train.epochs=3",
    "train.warmup_epochs=1",
    "train.model_ema=true",
    "train.model_ema_decay=0.8",
    "train.grad_accum_steps=2",
    "train.clip_grad=1.0",
    "data.mixup=0.4",
    "data.reprob=0.5",
    "data.pad=1",
    "model.kwargs={depth: 1, embed_dim: 24, drop_path_rate: 0.3, proj_drop_rate: 0.2}",
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("unbroken") / "run", *LIVELY)


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        (Trainer, "train_batch", 2, False),  # the first epoch: begun anew
        (Trainer, "train_batch", 7, False),  # in the middle of the second
        (Trainer, "update", 5, True),
        (Run, "save_state", 2, False),  # epoch 2 is trained and lost
        (Run, "save_state", 2, True),  # state written, weights not
        (Run, "save_state", 3, True),  # after the last epoch
        (Run, "save_weights", 4, False),  # between last and last_ema of the second epoch, or best of the first
        (Run, "save_weights", 5, False),
        (Run, "save_metrics", 2, False),
        (Run, "save_metrics", 2, True),  # between two epochs
        (Run, "save_metrics", 3, False),  # all trained, nothing told
    ],
)
def test_a_run_stopped_anywhere_ends_as_the_unbroken_one(
    owner: Any, name: str, call: int, after: bool, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, owner, name, call, after=after)
        with pytest.raises(Stop):
            small_run(run, *LIVELY)
    small_run(run, *LIVELY)
    assert_same_run(run, unbroken)
    assert [row["epoch"] for row in rows_of(run)] == [0, 1, 2]


def test_a_run_stopped_again_and_again_ends_as_the_unbroken_one(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (6, 3, 5):
        stopped_run(monkeypatch, tmp_path / "run", call, *LIVELY)
    small_run(tmp_path / "run", *LIVELY)
    assert_same_run(tmp_path / "run", unbroken)


def test_a_plateau_schedule_remembers_how_long_it_has_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        "train.sched=plateau",
        "train.epochs=5",
        "train.patience_epochs=1",
        "train.decay_rate=0.5",
        "train.opt=sgd",
        "train.lr=1e-6",  # accuracy never improves, so the rate falls in the fourth epoch
        "train.min_lr=0",
    )
    unbroken = small_run(tmp_path / "unbroken", *settings)
    assert [row["lr"] for row in rows_of(unbroken)] == [1e-6, 1e-6, 1e-6, 5e-7, 5e-7]
    with monkeypatch.context() as patch:
        stop_at(patch, Run, "save_metrics", 2, after=True)
        with pytest.raises(Stop):
            small_run(tmp_path / "run", *settings)
    small_run(tmp_path / "run", *settings)
    assert_same_run(tmp_path / "run", unbroken)


class Remembering(Supervised):
    """A task with a memory, and another one beside the average of the weights."""

    def __post_init__(self, model: torch.nn.Module) -> None:
        super().__post_init__(model)
        self.memory = {False: torch.zeros(1), True: torch.zeros(1)}

    def get_task_state(self, module: Any = None, ema: bool = False) -> dict[str, Any]:
        return {"memory": self.memory[ema]}

    def load_task_state(self, state: Any, strict: bool = True, module: Any = None, ema: bool = False) -> None:
        if state:
            self.memory[ema] = state["memory"]


@pytest.mark.parametrize(
    "settings",
    [
        ("task=remembering", "train.model_ema=true"),
        ("train.precision=fp16",),
        ("train.sched=plateau", "train.lr_noise=[0.0, 1.0]", "train.lr=0.1"),
        ("task={use: free, eps: 0.1}", "train.opt=sgd"),
    ],
    ids=["average and task", "scaler", "plateau under noise", "delta"],
)
def test_all_that_a_session_remembers_comes_back(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks._pieces, "remembering", Remembering)
    session = small_session(*settings)
    Trainer(session).train_epoch()
    if isinstance(session.task, Remembering):
        session.task.memory = {False: torch.ones(1), True: torch.full((1,), 2.0)}
    session.scheduler.step(1, 0.5)
    state = capture(session)
    other = small_session(*settings)
    restore(other, state, "here")
    assert_same(capture(other), state)


def digits_on_disk(file: Path, *, brighter: float = 0.0, swapped: bool = False) -> tuple[str, ...]:
    """A few digits in a file, one of them brighter, or two with each other's label."""
    images = torch.rand(48, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.9
    images[7, 0, 0, 0] += brighter
    labels = torch.arange(48) % 10
    if swapped:
        labels[[3, 4]] = labels[[4, 3]]
    save_tensors(file, {"images": images, "labels": labels})
    return ("data.dataset=tensors", f"data.root={file}", "data.val_num_samples=null")


@pytest.mark.parametrize(
    ("change", "said"), [({"brighter": 1e-3}, "contents were"), ({"swapped": True}, "labels were")], ids=str
)
def test_data_that_changed_between_two_halves_is_noticed_and_said(
    change: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    settings = digits_on_disk(tmp_path / "digits.safetensors")
    stopped_run(monkeypatch, run, 6, *settings)
    before = state_of(run)
    digits_on_disk(tmp_path / "digits.safetensors", **change)
    letter = rf"images have changed since the run stopped: .*{said} .*\. Put them back, .* data\.changed=warn"
    with pytest.raises(RunError, match=letter):
        small_run(run, *settings)
    assert state_of(run)["updates"] == before["updates"]
    small_run(run, *settings, "data.changed=warn")
    assert "The run resumes with them" in caplog.text
    assert len(rows_of(run)) == 2


def test_data_that_has_moved_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    stopped_run(monkeypatch, run, 6, *digits_on_disk(tmp_path / "digits.safetensors"))
    small_run(run, *digits_on_disk(tmp_path / "elsewhere.safetensors"))
    assert len(rows_of(run)) == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_files_with_other_times_alone_are_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (
        "data.dataset=folder",
        f"data.root={tmp_path / 'data'}",
        "data.val_num_samples=null",
        "data.workers=0",
    )
    for split in ("train", "val"):
        for number in range(48):
            file = tmp_path / "data" / split / f"c{number % 10}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    stopped_run(monkeypatch, tmp_path / "run", 6, *settings)
    os.utime(file)
    os.utime(tmp_path / "data" / "train" / "c0" / "0.png")
    small_run(tmp_path / "run", *settings)
    assert not caplog.records
