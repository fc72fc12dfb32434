"""A run folder: what it holds and keeps, who may go on with it, and what is left when something fails."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open

from small_run import assert_same, assert_same_run, contents, rows_of, small_config, small_run, state_of, stopped_run
from vitruvius import __version__
from vitruvius._errors import RunError
from vitruvius._files import load_tensors
from vitruvius._yaml import read_yaml
from vitruvius.models import create_model
from vitruvius.training import read_recipe, train
from vitruvius.training.checkpoint import epochs_to_keep
from vitruvius.training.config import Keep
from vitruvius.training.loop import Trainer
from vitruvius.training.run_folder import Run, kept_weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small", "seed=7", "train.model_ema=true")


def test_it_holds_what_was_asked_what_happened_and_the_weights(run: Path) -> None:
    names = {"config.yaml", "metrics.jsonl", "state.pt", "state.previous.pt"} | {
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
    monkeypatch.setattr(Trainer, "train_batch", None)  # no batch is ever trained on
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
    again = Run(run)
    again.begin(
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
    again.release()


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    (run / ".state.pt.123.tmp").write_bytes(b"half")
    small_run(run, "train.epochs=1")
    assert not list(run.glob(".*"))


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
