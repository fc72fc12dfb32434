"""A recipe may ask questions of attention while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitruvius._errors import UnknownName
from vitruvius._files import load_tensors
from vitruvius.analysis import read_rows
from vitruvius.data import DataConfig
from vitruvius.models import ModelConfig
from vitruvius.training import Config, TrainConfig, train


def recipe(out: Path, *analyses: str) -> Config:
    return Config(
        model=ModelConfig(name="vitruvius/vit_digits", kwargs={"depth": 1}),
        data=DataConfig(train_num_samples=96, batch_size=32),
        analyses=list(analyses),
        train=TrainConfig(epochs=2, analyse_images=8, device="cpu"),
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


def test_an_unknown_analysis_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'entropy'"):
        train(recipe(tmp_path / "run", "entropi"), quiet=True)
