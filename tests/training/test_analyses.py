"""A recipe may ask questions of attention while it trains."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitruvius._files import load_tensors
from vitruvius.analysis.callback import read_rows
from vitruvius.data import DataConfig
from vitruvius.models.config import ModelConfig
from vitruvius.training import Config, TrainConfig, train


def recipe(out: Path, *analyses: str, tracking: Sequence[str] = (), every: int = 1) -> Config:
    return Config(
        model=ModelConfig(name="vitruvius/vit_digits", kwargs={"depth": 1}),
        data=DataConfig(train_num_samples=96, batch_size=32),
        analyses=list(analyses),
        train=TrainConfig(epochs=2, analyse_images=8, analyse_every=every, device="cpu"),
        tracking=list(tracking),
        out=str(out),
    )


def test_the_run_keeps_a_curve_for_every_statistic(tmp_path: Path) -> None:
    folder = train(recipe(tmp_path / "run", "entropy", "norms"), quiet=True)
    rows = read_rows(folder)
    assert {(row["epoch"], row["batch"]) for row in rows} == {(e, b) for e in (0, 1) for b in ("train", "validation")}
    assert {row["analysis"].split(":")[0] for row in rows} == {"entropy", "norms"}


def test_looking_does_not_change_the_training(tmp_path: Path) -> None:
    plain = train(recipe(tmp_path / "plain"), quiet=True)
    watched = train(recipe(tmp_path / "watched", "entropy"), quiet=True)
    mine, theirs = (load_tensors(run / "last.safetensors")[0] for run in (plain, watched))
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_run_that_goes_on_has_every_epoch_once_in_its_curves(tmp_path: Path) -> None:
    folder = train(recipe(tmp_path / "run", "entropy"), quiet=True)
    whole = (folder / "analysis.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    half = "".join(line for line in lines if '"epoch": 0' in line)
    for found in (half, half + lines[-1][:20], whole + lines[-1].replace('"epoch": 1', '"epoch": 2')):
        (folder / "analysis.jsonl").write_text(found)  # killed before or while the answer was written; an undone epoch
        train(recipe(tmp_path / "run", "entropy"), quiet=True)
        assert (folder / "analysis.jsonl").read_text() == whole


class Remembering:
    """A tracker that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[dict[str, Any]]] = []

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        pass

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        self.shown.append([dict(row) for row in rows])

    def close(self) -> None:
        pass


def test_every_tracker_is_shown_the_analyses_of_every_epoch(tmp_path: Path) -> None:
    remembering = Remembering()
    config = recipe(tmp_path / "run", "norms:variant=released", tracking=["csv"])
    folder = train(replace(config, tracking=["csv", remembering]), quiet=True)
    key = "analysis/norms:variant=released/log10_ratio/validation"
    values = [row["mean"] for row in read_rows(folder) if row["batch"] == "validation"]
    ratios = values[:: len(values) // 2]
    assert [row[key] for row in remembering.shown[-1]] == ratios
    assert remembering.shown[1][0][key] == ratios[0]  # as soon as the epoch is over
    with (folder / "metrics.csv").open() as file:
        assert [float(row[key]) for row in csv.DictReader(file)] == ratios
    again = Remembering()
    train(replace(config, tracking=[again]), quiet=True)
    assert [row[key] for row in again.shown[0]] == ratios  # a run that goes on brings them along
    assert key not in (folder / "metrics.jsonl").read_text()


def test_epochs_without_an_analysis_leave_trackers_a_gap(tmp_path: Path) -> None:
    folder = train(recipe(tmp_path / "run", "entropy", tracking=["csv"], every=2), quiet=True)
    with (folder / "metrics.csv").open() as file:
        cells = [row["analysis/entropy/nats/train"] for row in csv.DictReader(file)]
    assert cells[0] == ""
    assert float(cells[1]) > 0
