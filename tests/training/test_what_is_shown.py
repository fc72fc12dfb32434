"""What a person sees: a live bar in a terminal, a plain line an epoch elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from small_run import small_config, small_session
from vitruvius.tasks import Objective
from vitruvius.training import train
from vitruvius.training.loop import Trainer, describe_epoch

LINE = r"epoch {}/2  loss \d\.\d{{3}}  accuracy +\d+\.\d %  held-out +\d+\.\d %  EMA +\d+\.\d %  [\d,]+ images/s"


def lines_of_a_run(tmp_path: Path, *overrides: str, quiet: bool = False) -> list[str]:
    out = io.StringIO()
    train(small_config(tmp_path / "run", *overrides), quiet=quiet, console=Console(file=out, width=120))
    return out.getvalue().splitlines()


def test_without_a_terminal_every_epoch_is_one_plain_line_after_the_beginning(tmp_path: Path) -> None:
    data, model, first, *lines = lines_of_a_run(tmp_path, "train.model_ema=true")
    assert data == "data digits: 36 images to train on, 12 held out, 10 classes"
    assert re.fullmatch(r"model vitruvius/vit_digits: [\d,]+ parameters on cpu", model)
    assert re.fullmatch(r"first batch: \d+\.\d s", first)
    assert len(lines) == 2
    for number, text in enumerate(lines, 1):
        assert re.fullmatch(LINE.format(number), text)


def test_quiet_says_nothing_and_a_resumed_run_says_from_where(tmp_path: Path) -> None:
    assert lines_of_a_run(tmp_path, quiet=True) == []
    assert "resuming at epoch 3, after 8 updates" in lines_of_a_run(tmp_path)


def test_the_progress_is_in_batches_of_all_epochs() -> None:
    seen: list[tuple[float, float | None, str]] = []
    trainer = Trainer(small_session(), progress=lambda *told: seen.append(told))
    trainer.run()
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {8}
    assert seen[0] == (0, 8, "epoch 1/2, batch 0 of 4")
    assert re.fullmatch(r"epoch 2/2, loss \d\.\d{3}, accuracy [\d.]+ %, [\d,]+ images/s", seen[-1][2])


def test_a_line_leaves_out_what_was_not_looked_at_and_alarms_of_earlier_epochs() -> None:
    row = {"epoch": 4, "train_loss": 0.4123, "train_accuracy": 0.912, "images_per_second": 1204.4}
    assert describe_epoch(row, 10) == "epoch  5/10  loss 0.412  accuracy  91.2 %  1,204 images/s"
    row |= {"alarms": 1, "single_step_accuracy": 0.6, "multi_step_accuracy": 0.2}
    assert "ALARM 1 (one step 60.0 %, several 20.0 %)" in describe_epoch(row, 10)
    assert "ALARM" not in describe_epoch(row, 10, alarms_before=1)


def test_a_compiled_run_announces_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "compile", lambda *_, **__: None)
    lines = lines_of_a_run(tmp_path, "train.compile=true")
    assert "compiling the model for the first batch" in lines
    assert any(re.fullmatch(r"first batch: \d+\.\d s, compiling included", line) for line in lines)
