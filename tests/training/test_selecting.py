"""Honest selection and the alarm: robust weights are chosen by several steps on held-out images; a collapse is seen."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from small_run import assert_same_run, rows_of, small_config, small_run, small_session, state_of, stopped_run
from vitruvius._errors import ConfigError, Overfitted
from vitruvius._processes import Process
from vitruvius.attacks.base import Model, disturb
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.data import eval_loader
from vitruvius.data.loading import held_out
from vitruvius.evaluation import describe, evaluate
from vitruvius.models import load_model
from vitruvius.training import train
from vitruvius.training.alarm import Alarm
from vitruvius.training.loop import Trainer
from vitruvius.training.selection import Selection, attack_in_turn

ALONE = Process(device=torch.device("cpu"))
HARDENED = ("task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 1}}", "train.alarm_images=8")


def test_robust_is_what_stands_after_one_step_and_after_ten_on_the_held_out_images(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", *HARDENED, "train.epochs=1", "train.model_ema=true")
    config, model = small_config(run), load_model(run, best=False)
    chosen = held_out(config.data, 0.25, seed=config.seed)
    loader = eval_loader(config.data, input_size=model.data_config, split="train", only=chosen)
    threats = FGSM(eps=0.1), PGD(eps=0.1, steps=10, best=True)
    report = evaluate(model, loader, threats)
    row, (one, several) = rows_of(run)[0], (report.ledger.find(describe(t), chosen)["correct"] for t in threats)
    assert row["val_robust_accuracy"] == float((one & several).double().mean())
    assert row["val_accuracy"] == report["clean"].accuracy
    assert state_of(run)["best"] == max(row["val_robust_accuracy"], row["ema_robust_accuracy"])


def test_robust_accuracy_chooses_where_the_task_has_a_threat(tmp_path: Path) -> None:
    selection = Selection(small_session(*HARDENED))
    for epoch, (clean, robust) in enumerate([(0.5, 0.3), (0.9, 0.1), (0.6, 0.4)]):
        selection.choose({"epoch": epoch, "val_accuracy": clean, "val_robust_accuracy": robust})
    assert (selection.session.best_epoch, selection.session.best) == (2, 0.4)
    selection.choose({"epoch": 3, "val_accuracy": 0.6, "val_robust_accuracy": 0.4})
    selection.choose({"epoch": 4, "val_accuracy": 0.9})  # nothing attacked it
    assert selection.session.best_epoch == 3  # of equals the later
    assert selection.key == "robust_accuracy"
    clean_only = Selection(small_session(*HARDENED, "train.select=clean"))
    assert not clean_only.threats
    assert not Selection(small_session()).threats


def test_few_images_may_choose_and_they_are_held_out(tmp_path: Path) -> None:
    session = small_session(*HARDENED, "train.select_images=5", "seed=3")
    few = {int(i) for _, _, ids in Selection(session).attacked.with_ids() for i in ids}
    held = {int(i) for _, _, ids in session.val_loader.with_ids() for i in ids}
    assert len(few) == 5
    assert few < held
    chosen = torch.tensor(sorted(held))[torch.randperm(12, generator=torch.Generator().manual_seed(3))[:5]]
    assert few == set(chosen.tolist())
    assert Selection(session).judge()["val_robust_accuracy"] * 5 % 1 == pytest.approx(0)


def test_a_threat_of_ones_own_may_choose(tmp_path: Path) -> None:
    spec = '"pgd:eps=0.05,steps=4,restarts=2"'
    selection = Selection(small_session("train.select=robust", f"train.select_threat={spec}"))
    assert selection.threats == (PGD(eps=0.05, steps=4, restarts=2),)


@pytest.mark.parametrize(
    ("overrides", "letter"),
    [
        (["train.select=robust"], "the task trains against no attack; name one that chooses"),
        (["train.select=robust", 'train.select_threat="fgsm:eps=0.1"'], "one step flatters models trained on one"),
        (["train.select=robust", 'train.select_threat="pgd:eps=0.1,steps=1"'], "one step flatters"),
        (['train.select_threat="pgd:eps=0.1"'], "accuracy on clean images chooses; set train.select=robust"),
        (["train.alarm=stop"], "train.alarm = stop, but the task trains against no attack"),
        (["train.alarm_gap=0"], "train.alarm_gap = 0, expected a number above 0 and at most 1"),
        (["train.alarm_steps=1"], "train.alarm_steps = 1, expected a whole number of at least 2"),
        (["task={use: free, eps: 0.1}", "train.grad_accum_steps=2"], "the task replays every batch 4 times; use 1"),
    ],
)
def test_what_cannot_choose_is_refused_before_a_folder_is_made(
    overrides: list[str], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=letter):
        small_run(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_choosing_on_the_validation_split_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Selection(small_session(*HARDENED, "train.holdout=0"))
    assert "the best weights are chosen on data.val_split=validation. If that is the test set" in caplog.text


class Wavy(nn.Module):
    """Right at the image and a whole step away from it, wrong half way: its slope at the image leads to safety."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        way = (x - 0.5).mean((1, 2, 3)) / self.eps  # from -1 to 1
        margin = torch.cos(2 * torch.pi * way + 0.3)
        return torch.stack([margin, -margin], 1)


def test_a_model_that_only_one_step_cannot_fool_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.full((6, 1, 2, 2), 0.5), torch.zeros(6, dtype=torch.long)
    model, config = Wavy(0.1).train(), SimpleNamespace(alarm_gap=0.25, alarm_steps=10)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(train=config, data=SimpleNamespace(eval_batch_size=None, batch_size=4)),
        task=SimpleNamespace(threat=("linf", 0.1), radius=0.1),
        process=ALONE,
        alarms=0,
        updates=0,
        epoch=0,
        rollbacks=0,
        agree_on_statistics=lambda: None,
        eval_model=lambda: model,
        autocast=lambda: torch.no_grad(),
    )
    alarm = Alarm(session, "none", [(images, labels, torch.arange(6))])
    assert alarm.read() == (1.0, 0.0)
    with pytest.raises(Overfitted):
        alarm.check()
    monkeypatch.setattr(alarm, "read", lambda: (0.6, 0.4))
    assert alarm.check() == {"single_step_accuracy": 0.6, "multi_step_accuracy": 0.4}
    assert model.training


def note_attacks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The threats of every look at held-out images from now on, with how many of them are attacked at a time."""
    seen: list[Any] = []

    def noting(threat: Any, model: Model, x: Tensor, *rest: Any) -> Tensor:
        seen.append((threat, len(x)))
        return disturb(threat, model, x, *rest)

    monkeypatch.setattr("vitruvius.training.selection.disturb", noting)
    return seen


GROWING = "task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 1}, schedule: {use: linear, epochs: 2}}"


def test_the_alarm_attacks_with_the_radius_that_training_has_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = note_attacks(monkeypatch)
    small_run(tmp_path / "run", GROWING, "train.alarm_images=8", "train.epochs=3", "train.select=clean")
    assert [threat.eps for threat, _ in seen if isinstance(threat, FGSM)] == [0.0, 0.05, 0.1]
    assert {threat.eps for threat, _ in seen if isinstance(threat, PGD)} <= {0.0, 0.05, 0.1}


def test_nothing_is_chosen_while_the_radius_grows_unless_the_run_ends_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = note_attacks(monkeypatch)
    grown = small_run(tmp_path / "grown", GROWING, "train.alarm=none", "train.epochs=4")
    assert ["val_robust_accuracy" in row for row in rows_of(grown)] == [False, False, True, True]
    assert all("val_accuracy" in row for row in rows_of(grown))
    assert state_of(grown)["best_epoch"] >= 2
    assert {threat.eps for threat, _ in seen} == {0.1}
    ended = small_run(tmp_path / "ended", GROWING, "train.alarm=none")
    assert ["val_robust_accuracy" in row for row in rows_of(ended)] == [False, True]
    assert state_of(ended)["best_epoch"] == 1
    named = (GROWING, "train.alarm=none", 'train.select_threat="pgd:eps=0.1,steps=2"')
    assert all("val_robust_accuracy" in row for row in rows_of(small_run(tmp_path / "named", *named)))


def test_judging_costs_at_most_three_gradients_for_twenty_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch in which eps grows, whose weights the alarm alone attacks, and one that is a candidate."""
    images = {"train": 0, "judge": 0}
    forward, judge = VisionTransformer.forward, Trainer.judge
    now = ["train"]

    def counted(self: VisionTransformer, x: Tensor, *rest: Any) -> Tensor:
        images[now[0]] += len(x) * torch.is_grad_enabled()
        return forward(self, x, *rest)

    def judged(self: Trainer) -> dict[str, float]:
        now[0] = "judge"
        row = judge(self)
        now[0] = "train"
        return row

    monkeypatch.setattr(VisionTransformer, "forward", counted)
    monkeypatch.setattr(Trainer, "judge", judged)
    small = ("model.kwargs={depth: 1, embed_dim: 24}", "train.epochs=2", "train.warmup_epochs=0", "train.device=cpu")
    rising = "task.schedule={use: linear, epochs: 1, per: update}"
    train("digits/adversarial", [*small, rising, f"out={tmp_path / 'run'}"], quiet=True)
    assert 4 * 39 * 64 <= images["train"] <= 4 * 40 * 64
    assert 0 < images["judge"] <= 0.15 * images["train"]
    assert 0.15 * images["train"] >= 2 * 64 * 11  # even if all of them stood


def test_what_has_just_chosen_is_not_attacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    read, now = Alarm.read, [0]

    def reading(self: Alarm) -> tuple[float, float]:
        now[0] = self.session.updates
        return read(self)

    def noting(*arguments: Any) -> Any:
        looks.append(now[0])
        return attack_in_turn(*arguments)

    monkeypatch.setattr(Alarm, "read", reading)
    monkeypatch.setattr("vitruvius.training.alarm.attack_in_turn", noting)
    shared = rows_of(small_run(tmp_path / "shared", *HARDENED, "train.alarm_every=3"))
    assert looks == [3, 6]  # not after epochs, at 4 and 8
    with monkeypatch.context() as patch:
        patch.setattr(Selection, "stood", lambda *_: None)
        assert rows_of(small_run(tmp_path / "apart", *HARDENED, "train.alarm_every=3")) == shared
    assert looks == [3, 6, 3, 4, 6, 8]
    small_run(tmp_path / "another", *HARDENED, "train.alarm_steps=3", "train.epochs=1")
    assert looks[6:] == [4]  # other steps than those that choose


@pytest.fixture
def collapse(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Training collapses at update 6, unless the rate has been lowered; the updates at which somebody looked."""
    looks: list[int] = []

    def read(self: Alarm) -> tuple[float, float]:
        looks.append(self.session.updates)
        fallen = self.session.updates >= 6 and self.session.rollbacks == 0
        return (0.9, 0.1) if fallen else (0.5, 0.4)

    monkeypatch.setattr(Alarm, "read", read)
    return looks


def test_the_alarm_reports_and_training_goes_on(
    collapse: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="vitruvius.training.loop")
    rows = rows_of(small_run(tmp_path / "run", *HARDENED, "train.alarm_every=2"))
    assert collapse == [2, 4, 4, 6, 8, 8]
    assert [row["alarms"] for row in rows] == [0, 3]
    assert (rows[1]["single_step_accuracy"], rows[1]["multi_step_accuracy"]) == (0.9, 0.1)
    assert "catastrophic overfitting at update 6 (epoch 2): accuracy is 90.0 % under one step, 10.0 %" in caplog.text
    first, second = (record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch "))
    assert "ALARM" not in first
    assert "ALARM 3 (one step 90.0 %, several 10.0 %)" in second


def test_the_alarm_stops(collapse: list[int], tmp_path: Path) -> None:
    with pytest.raises(Overfitted, match=r"at update 6 .*Use a multi-step inner attack"):
        small_run(tmp_path / "run", *HARDENED, "train.alarm_every=1", "train.alarm=stop")
    assert len(rows_of(tmp_path / "run")) == 1


BACK = (*HARDENED, "train.alarm=rollback", "train.alarm_every=2", "train.save_every=1", "train.epochs=3")


def test_the_alarm_goes_back_to_the_last_calm_state_with_a_lower_rate(collapse: list[int], tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", *BACK, "train.sched=step", "train.opt=sgd", "train.lr=0.1")
    assert collapse == [2, 4, 4, 6, 4, 6, 8, 8, 10, 12, 12]  # from 6 back to the end of epoch 1
    rows = rows_of(run)
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.05, 0.05])
    assert [row["rollbacks"] for row in rows] == [1, 1, 1]  # the first epoch's row was made anew


def test_a_rolled_back_run_stopped_anywhere_ends_as_the_unbroken_one(
    collapse: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken, run = small_run(tmp_path / "unbroken", *BACK), tmp_path / "run"
    for call in (4, 6, 3, 4):
        stopped_run(monkeypatch, run, call, *BACK)
    small_run(run, *BACK)
    assert_same_run(run, unbroken)


def test_an_alarm_that_no_rollback_silences_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def read(self: Alarm) -> tuple[float, float]:
        if self.session.updates < 6:
            return 0.5, 0.4
        rates.append(self.session.optimizer.param_groups[0]["lr"])
        return 0.9, 0.1

    monkeypatch.setattr(Alarm, "read", read)
    with pytest.raises(Overfitted, match=r"3 rollback\(s\) have not helped"):
        small_run(tmp_path / "run", *BACK, "train.alarm_every=1", "train.sched=step", "train.opt=sgd", "train.lr=0.1")
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_a_free_task_sees_every_batch_as_often_as_it_asks(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "task={use: free, eps: 0.1, replays: 3}", "train.epochs=1", "train.alarm=none")
    assert state_of(run)["updates"] == 12
    assert "train_loss" in rows_of(run)[0]
