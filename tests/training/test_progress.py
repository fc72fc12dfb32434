"""What a person sees: a live bar in a terminal, a plain line an epoch elsewhere."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from small_run import small_config
from vitruvius.training import _build, _progress_bar, train
from vitruvius.training._progress_bar import Bar, FirstBatch, line

LINE = r"epoch {}/2  loss \d\.\d{{3}}  accuracy +\d+\.\d %  held-out +\d+\.\d %  EMA +\d+\.\d %  [\d,]+ images/s"


def test_without_a_terminal_every_epoch_is_one_plain_line_after_the_beginning(tmp_path: Path) -> None:
    out = io.StringIO()
    train(small_config(tmp_path / "run", "train.model_ema=true"), console=Console(file=out, width=120))
    data, model, first, *lines = out.getvalue().splitlines()
    assert data == "data digits: 36 images to train on, 12 held out, 10 classes"
    assert re.fullmatch(r"model vitruvius/vit_digits: [\d,]+ parameters on cpu", model)
    assert re.fullmatch(r"first batch: \d+\.\d s", first)
    assert len(lines) == 2
    for number, text in enumerate(lines, 1):
        assert re.fullmatch(LINE.format(number), text)
    assert "\x1b" not in out.getvalue()


def test_quiet_says_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    train(small_config(tmp_path / "run"), quiet=True, console=Console(file=out))
    assert out.getvalue() == ""


def test_in_a_terminal_the_bar_shows_rate_loss_accuracy_and_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, height=20)
    with Bar(epochs=3, start=1, batches=10, shown=True, console=console) as bar:
        bar.start(1)
        bar.batch(5, {"loss": 0.25, "accuracy": 0.5, "images": 640.0, "seconds": 2.0})
        bar.progress.refresh()
        assert bar.progress.tasks[0].completed == 15
        assert bar.progress.tasks[0].total == 30
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"epoch 2/3 .*loss 0\.250  accuracy  50\.0 %  320 images/s .*left", shown)


def test_a_line_leaves_out_what_was_not_looked_at() -> None:
    row = {"epoch": 4, "train_loss": 0.4123, "train_accuracy": 0.912, "images_per_second": 1204.4}
    assert line(row, 10) == "epoch  5/10  loss 0.412  accuracy  91.2 %  1,204 images/s"


def test_an_alarm_is_told_in_its_own_epoch_only() -> None:
    out = io.StringIO()
    row = {"train_loss": 0.4, "train_accuracy": 0.9, "images_per_second": 12.0}
    looks = {"single_step_accuracy": 0.6, "multi_step_accuracy": 0.2}
    with Bar(epochs=3, start=0, batches=5, shown=True, console=Console(file=out, width=160)) as bar:
        for epoch, alarms in enumerate((0, 1, 1)):
            bar.epoch({"epoch": epoch, "alarms": alarms, **row, **looks})
    quiet, alarmed, after = out.getvalue().splitlines()
    assert "ALARM 1 (one step 60.0 %, several 20.0 %)" in alarmed
    assert "ALARM" not in quiet + after


def test_a_run_that_goes_on_says_from_where(tmp_path: Path) -> None:
    out = io.StringIO()
    train(small_config(tmp_path / "run"), quiet=True)
    train(small_config(tmp_path / "run"), console=Console(file=out, width=120))
    assert "going on at epoch 3, after 8 updates" in out.getvalue()


def test_a_slow_compiler_says_so_while_it_works_and_how_long_it_took() -> None:
    said: list[str] = []
    first = FirstBatch(said.append, compiles=True, every=0.05)
    with first.watched():
        time.sleep(0.2)
    assert said[:2] == ["compiling the model for the first batch", "still compiling after 0 s"]
    assert re.fullmatch(r"first batch: 0\.\d s, compiling included", said[-1])
    lines = len(said)
    with first.watched():  # the second one
        time.sleep(0.1)
    assert len(said) == lines


def test_a_compiled_run_announces_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(_build, "compile_task", lambda *_: None)
    train(small_config(tmp_path / "run", "train.compile=true"), console=Console(file=out, width=120))
    assert "compiling the model for the first batch\n" in out.getvalue()
    assert re.search(r"first batch: \d+\.\d s, compiling included\n", out.getvalue())


def test_a_long_epoch_writes_a_plain_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress_bar, "EVERY", 0.1)
    out = io.StringIO()
    numbers = {"loss": 0.25, "accuracy": 0.5, "images": 640.0, "seconds": 2.0}
    with Bar(epochs=3, start=0, batches=5000, shown=True, console=Console(file=out, width=120)) as bar:
        bar.start(0)
        bar.batch(10, numbers)
        bar.batch(20, numbers)
        time.sleep(0.3)
        bar.looking("held-out")
        time.sleep(0.3)
    lines = out.getvalue().splitlines()
    begins = "epoch 1/3  batch 20 of 5,000  loss 0.250  accuracy  50.0 %  320 images/s  "
    assert re.fullmatch(re.escape(begins) + r"\d+ s left", lines[0])
    assert re.fullmatch(r"epoch 1/3  judging the held-out images  \d+ s left", lines[-1]), "also while no batch comes"
    assert len(lines) >= 3


def test_short_epochs_are_followed_by_their_own_lines_alone(tmp_path: Path) -> None:
    out = io.StringIO()
    train(small_config(tmp_path / "run"), console=Console(file=out, width=120))
    assert not re.search(r"  batch \d| left$", out.getvalue())
