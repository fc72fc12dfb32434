"""A run folder: what it holds, who may go on with it, and what is left when something fails."""

from __future__ import annotations

import errno
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open

from small_run import assert_same, assert_same_run, rows_of, small_config, small_run, state_of
from vitruvius import __version__
from vitruvius._errors import CheckpointError, ConfigError, DataError, Diverged, RunError, VitruviusError
from vitruvius._files import _local
from vitruvius._yaml import read_yaml
from vitruvius.models import create_model
from vitruvius.training import _epoch, read_recipe, train
from vitruvius.training._run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small", "seed=7", "train.model_ema=true")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_holds_what_was_asked_what_happened_and_the_weights(run: Path) -> None:
    names = {"config.yaml", "metrics.jsonl", "state.pt"} | {
        f"{name}.safetensors" for name in ("best", "last", "last_ema")
    }
    assert {path.name for path in run.iterdir()} == names


def test_the_config_is_resolved_with_versions_and_seed(run: Path) -> None:
    config = read_yaml(run / "config.yaml")
    assert config["seed"] == 7
    assert config["versions"] == {**config["versions"], "vitruvius": __version__, "timm": timm.__version__}
    assert config["versions"]["torch"] == torch.__version__
    assert config["model"]["kwargs"] == {"depth": 1, "embed_dim": 24, "num_classes": 10}
    assert (config["model"]["mean"], config["model"]["std"]) == ([0.5] * 3, [0.5] * 3)
    assert config["train"]["momentum"] == 0.9
    again = read_recipe(run / "config.yaml")  # a resolved recipe is a recipe
    assert again.train.epochs == 2


def test_the_metrics_have_one_row_an_epoch(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    for row in rows:
        assert {"train_loss", "train_accuracy", "val_accuracy", "ema_accuracy", "lr", "seconds"} < set(row)
        assert 0 <= row["val_accuracy"] <= 1
        assert row["images_per_second"] > 0


def test_the_weights_carry_plain_timm_keys_and_say_where_they_come_from(run: Path) -> None:
    keys = set(create_model("vitruvius/vit_digits", depth=1, embed_dim=24).model.state_dict())
    for name in ("best", "last", "last_ema"):
        with safe_open(run / f"{name}.safetensors", "pt") as file:
            assert set(file.keys()) == keys
            assert json.loads(file.metadata()["epoch"]) in (0, 1)
    best = max(max(row["val_accuracy"], row["ema_accuracy"]) for row in rows_of(run))
    with safe_open(run / "best.safetensors", "pt") as file:
        assert json.loads(file.metadata()["accuracy"]) == best == state_of(run)["best"]


def test_running_the_same_recipe_again_is_finished_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(run)
    monkeypatch.setattr(_epoch, "_step", None)  # no batch is ever trained on
    assert train(small_config(run, "seed=7", "train.model_ema=true"), quiet=True) == run
    assert contents(run) == before


def test_another_recipe_in_the_same_folder_is_refused(run: Path) -> None:
    before = contents(run)
    with pytest.raises(RunError) as caught:
        small_run(run, "seed=8", "train.model_ema=true", "train.lr=0.1")
    letter = str(caught.value)
    assert "holds a run of another recipe" in letter
    assert "seed was 7, now 8" in letter
    assert "train.lr was 0.005, now 0.1" in letter
    assert "Choose another folder with out=…, or delete this one." in letter
    assert contents(run) == before


def test_what_does_not_change_the_training_may_change(run: Path) -> None:
    Run(run).begin(
        small_config(
            run,
            "seed=7",
            "train.model_ema=true",
            "model.kwargs.num_classes=10",
            "model.mean=[0.5, 0.5, 0.5]",
            "model.std=[0.5, 0.5, 0.5]",
            "data.workers=9",
            "data.root=/elsewhere",
            "train.device=auto",
        )
    )


def test_a_damaged_state_is_said_and_kept(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    state = run / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"state.pt is damaged .*Delete it to begin this run anew"):
        small_run(run, "train.epochs=1")
    assert contents(run) == before


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    (run / ".state.pt.123.tmp").write_bytes(b"half")
    small_run(run, "train.epochs=1")
    assert not list(run.glob(".*"))


@pytest.mark.parametrize(
    ("overrides", "error", "letter"),
    [
        (["model.name=vitruvius/vit_digit"], VitruviusError, "did you mean 'vitruvius/vit_digits'"),
        (["attention=[{parts: [rcp]}]"], VitruviusError, "no attention named 'rcp'; did you mean 'rpc'"),
        (["attention=[{where: x, parts: [rpc]}]"], VitruviusError, "where='x' matches none of the 1 attention sites"),
        (["task=supervized"], VitruviusError, "no task named 'supervized'; did you mean 'supervised'"),
        (["task={use: supervised, penalty: 1}"], ConfigError, "no part of the model's attention has a penalty"),
        (["init=mimetik"], VitruviusError, "mimetic"),
        (["train.opt=adamm"], ConfigError, "train.opt = 'adamm' cannot be made"),
        (["data.dataset=folder"], DataError, "data.root is not set"),
        (["data.dataset=folder", "data.root=/no/such/place"], DataError, "does not exist"),
        (["model.kwargs.num_classes=7"], ConfigError, "num_classes = 7, but digits has 10 classes"),
        (["model.kwargs.dept=2"], ConfigError, "cannot be made with .*'dept'"),
        (["model.kwargs.num_heads=5"], ConfigError, "cannot be made with .*'num_heads': 5"),
        (["data.batch_size=640"], DataError, "do not fill one batch of 640"),
        (["train.device=quantum"], ConfigError, "device 'quantum' cannot be used here"),
        (["plugins=[no_such_lab]"], ConfigError, "no_such_lab"),
        (["model.weights=/no/such/run"], CheckpointError, "no weights at /no/such/run"),
        (["train.compile=hopes"], ConfigError, "train.compile = 'hopes'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_made(
    overrides: list[str], error: type[Exception], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=letter):
        small_run(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "letter"),
    [
        ("train.epochs=0", "train.epochs = 0, expected at least 1"),
        ("train.lr=0", "train.lr = 0.0, expected a number above 0"),
        ("train.holdout=1", "train.holdout = 1.0, expected a number from 0 to below 1"),
        ("train.clip_grad=-1", "train.clip_grad = -1.0, expected a number above 0, or null for none"),
        ("train.warmup_epochs=2", "train.warmup_epochs = 2, expected fewer than the 2 of train.epochs"),
        ("train.lr=fast", "train.lr = 'fast', expected a number"),
        ("train.epoch=3", r"unknown key 'train.epoch'; did you mean 'train.epochs'\?|did you mean 'epochs'\?"),
        ("trian.epochs=3", r"unknown key 'trian'; did you mean 'train'\?"),
        ("train.sched=cosinus", "expected one of cosine, tanh, step, multistep, plateau, poly, none"),
    ],
)
def test_a_recipe_that_cannot_be_meant_names_key_and_expectation(setting: str, letter: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=letter) as caught:
        small_config(tmp_path / "run", setting)
    assert "softmax.yaml" in str(caught.value)


def test_warmup_of_a_schedule_that_never_moves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.warmup_epochs = 1, but train.sched = none never moves"):
        small_config(tmp_path / "run", "train.sched=none", "train.warmup_epochs=1")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let so many files be written, then no more."""
    write, written = _local.write_synced, 0

    def failing(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(number, "simulated")
        write(path, data)

    monkeypatch.setattr(_local, "write_synced", failing)


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


def test_the_callers_dice_are_left_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(1), random.seed(2), np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    small_run(tmp_path / "run", "train.epochs=1", "data.mixup=0.5")
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert_same([before[2][0], before[2][1].tolist(), before[2][2]], [after[2][0], after[2][1].tolist(), after[2][2]])


def test_callbacks_are_told_after_every_epoch_and_cannot_disturb_the_training(run: Path, tmp_path: Path) -> None:
    class Curious:
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def epoch_end(self, epoch: int, model: torch.nn.Module) -> None:
            torch.rand(17), random.random()
            self.seen.append((epoch, len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())))

    curious = Curious()
    train(small_config(tmp_path / "run", "seed=7", "train.model_ema=true"), quiet=True, callbacks=[curious])
    assert curious.seen == [(0, 1), (1, 2)]
    assert_same_run(tmp_path / "run", run)
