"""Trackers: every row once, also after a stop; nothing secret; what is missing is said at once."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from small_run import small_config, small_run, stopped_run
from vitruvius._errors import ConfigError, MissingExtra, UnknownName
from vitruvius._registry import require
from vitruvius.tracking import trackers
from vitruvius.tracking.base import Row
from vitruvius.training import train

ROWS = [{"epoch": 0, "train_loss": 2.0}, {"epoch": 1, "train_loss": 1.0, "val_accuracy": 0.5}]


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        self.told.append(("open", config["seed"]))

    def log(self, rows: Sequence[Row]) -> None:
        self.told.append([row["epoch"] for row in rows])

    def close(self) -> None:
        self.told.append("close")


def test_a_tracker_is_opened_shown_all_rows_after_every_epoch_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    monkeypatch.setitem(trackers._pieces, "listener", lambda: listener)
    small_run(tmp_path / "run", "tracking=[listener]", "seed=3")
    assert listener.told == [("open", 3), [], [0], [0, 1], "close"]
    small_run(tmp_path / "run", "tracking=[listener, csv]", "seed=3")  # the same run: trackers may change
    assert listener.told[5:] == [("open", 3), [0, 1], "close"]


def test_the_table_has_one_line_an_epoch_and_the_numbers_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    settings = ("train.epochs=3", "tracking=[csv]")
    stopped_run(monkeypatch, run, 10, *settings)
    small_run(run, *settings)
    lines = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    table = [{key: float(value) for key, value in row.items()} for row in lines]
    assert table == [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_table_leaves_room_for_numbers_that_came_later(tmp_path: Path) -> None:
    table = trackers["csv"]()
    table.open(tmp_path, {})
    table.log([])
    assert not (tmp_path / "metrics.csv").exists()
    table.log(ROWS)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,train_loss,val_accuracy\n0,2.0,\n1,1.0,0.5\n"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_every_epoch_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rows in (ROWS[:1], ROWS):  # the second process finds what the first has left
        board = trackers["tensorboard"]()
        board.open(tmp_path, {})
        board.log(rows[:1])
        board.log(rows)
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(0, 2.0), (1, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("val_accuracy")] == [(1, 0.5)]


def records(file: Path) -> Iterator[bytes]:
    """The records of wandb's file: LevelDB's log format (blocks of 32 KiB, 7 bytes before a piece), after a head."""
    data = file.read_bytes()
    assert data.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is filled up
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all, or the last piece of it
            yield whole
            whole = b""


def offline_rows(run: Path) -> list[tuple[int, float]]:
    """(step, train_loss) of every row in wandb's own offline files, read back; its service may still be writing."""
    end = time.monotonic() + 20
    while (rows := rows_now(run)) != [(0, 2.0), (1, 1.0)] and time.monotonic() < end:
        time.sleep(0.05)
    return rows


def rows_now(run: Path) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in run.glob("wandb/offline-run-*/*.wandb"):
        for data in records(file):
            record = Record()
            record.ParseFromString(data)
            values = {[item.key, *item.nested_key][-1]: item.value_json for item in record.history.item}
            if "train_loss" in values:
                rows.append((int(values["_step"]), json.loads(values["train_loss"])))
    return sorted(rows)


KILLED = """
import os, signal, sys
from pathlib import Path
from vitruvius.tracking import trackers
tracker = trackers["wandb"](SETTINGS)
tracker.open(Path(sys.argv[1]), {"train": {"lr": 1, "opt": "sgd"}})
tracker.log([{"epoch": 0, "train_loss": 2.0}])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_every_row_once_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    """A true SIGKILL in an epoch; the rows are read back from wandb's own file."""
    environment = {**os.environ, "WANDB_SILENT": "true"}
    program = KILLED.replace("SETTINGS", "mode='offline', project='tests'")
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
    assert killed.returncode == -9
    assert json.loads((tmp_path / "wandb.json").read_text())["logged"] == 1
    tracker: Any = trackers["wandb"](mode="offline", project="tests")
    tracker.open(tmp_path, {})
    tracker.log(ROWS)
    tracker.close()
    assert offline_rows(tmp_path) == [(0, 2.0), (1, 1.0)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")
def test_wandb_works_offline_goes_on_with_the_same_run_and_keeps_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    logged = []
    for rows in (ROWS[:1], ROWS):
        tracker: Any = trackers["wandb"](mode="offline", project="tests")
        tracker.open(tmp_path, {"seed": 0})
        log = tracker.run.log
        note = lambda numbers, step, log=log: (logged.append(step), log(numbers, step))  # noqa: E731
        monkeypatch.setattr(tracker.run, "log", note)
        tracker.log(rows)
        tracker.close()
    assert logged == [0, 0, 1]  # the second process logs all rows, into a file of its own
    assert offline_rows(tmp_path) == [(0, 2.0), (1, 1.0)]
    notes = json.loads((tmp_path / "wandb.json").read_text())
    assert notes["logged"] == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(notes["id"] in path.name for path in files)
    assert not any(secret.encode() in path.read_bytes() for path in files)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_every_number_once_after_a_stop_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A true SIGKILL between two epochs; what is there is read back by MLflow's own client."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'vitruvius[mlflow]'")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    program = KILLED.replace("wandb", "mlflow").replace("SETTINGS", "")
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert killed.returncode == -9
    tracker: Any = trackers["mlflow"]()
    tracker.open(tmp_path, {"train": {"lr": 0.5, "opt": "adamw"}, "seed": 1})  # the settings of the start stay
    tracker.log(ROWS)
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("vitruvius").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name
    assert run.data.params == {"train.lr": "1", "train.opt": "sgd"}
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 2.0), (1, 1.0)]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "val_accuracy")] == [1]


def test_no_secret_is_written_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2-and-more")
    heard: list[dict[str, Any]] = []

    class Nosy(Listener):
        def open(self, folder: Path, config: dict[str, Any]) -> None:
            heard.append(config)

    monkeypatch.setitem(trackers._pieces, "nosy", Nosy)
    root = "data.train_split=https://me:hunter3@host/hunter2-and-more?sig=abc"
    config = small_config(tmp_path / "run", "train.epochs=1", root, "analyses=[]", "tracking=[nosy]")
    train(config, quiet=True)
    train(config, quiet=True)  # and the run is recognised all the same
    text = (tmp_path / "run" / "config.yaml").read_text() + json.dumps(heard)
    assert "hunter" not in text
    assert "sig=abc" not in text
    assert "https://***@host/***?sig=***" in text


@pytest.mark.parametrize(
    ("tracking", "error", "letter"),
    [
        ("[cvs]", UnknownName, "no tracker named 'cvs'; did you mean 'csv'"),
        ("[{use: csv, colour: red}]", ConfigError, "unknown key 'csv.colour'"),
        ("[3]", ConfigError, "expected a name such as 'csv'"),
    ],
)
def test_what_cannot_be_tracked_is_refused_before_a_folder_is_made(
    tracking: str, error: type[Exception], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=letter):
        small_run(tmp_path / "run", f"tracking={tracking}")
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_one_line() -> None:
    with pytest.raises(MissingExtra, match=r"pip install .*\[wandb\]'"):
        require("wandb_that_is_not_there", "wandb")
