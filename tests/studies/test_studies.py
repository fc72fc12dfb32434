"""Studies make tables and figures, and go on after a kill."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from vitruvius._errors import ConfigError, RunError, UnknownName
from vitruvius.attacks.pgd import PGD
from vitruvius.data import DataConfig, eval_loader
from vitruvius.studies import studies, study
from vitruvius.studies._base import open_subject

MODEL = "vitruvius/vit_digits"
FEW = {"images": 24, "batch_size": 16, "data.dataset": "digits"}


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_effectiveness_has_a_row_for_every_length_and_seed(tmp_path: Path) -> None:
    rows = table(study("attack-effectiveness", [MODEL], {**FEW, "steps": [1, 3], "seeds": [0, 1]}, tmp_path))
    assert [(row["steps"], row["seed"]) for row in rows] == [("1", "0"), ("1", "1"), ("3", "0"), ("3", "1")]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert (tmp_path / "figure.pdf").exists()


def test_effectiveness_agrees_with_a_plain_evaluation(tmp_path: Path) -> None:
    rows = table(study("attack-effectiveness", [MODEL], {**FEW, "steps": [2], "seeds": [3], "eps": 0.1}, tmp_path))
    model = vitruvius.create_model(MODEL)
    x, y, ids = next(iter(eval_loader(DataConfig(batch_size=24), input_size=model.data_config).with_ids()))
    moved = PGD(eps=0.1, steps=2, seed=3)(model, x, y, ids=ids)
    assert float(rows[0]["accuracy"]) == pytest.approx(float((model(moved).argmax(1) == y).float().mean()))


def test_the_loss_of_a_converging_attack_ends_where_the_attack_ends(tmp_path: Path) -> None:
    rows = table(study("attack-convergence", [MODEL], {**FEW, "steps": 4, "eps": 0.1}, tmp_path))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    subject = open_subject(MODEL, ["data.dataset=digits"], 24, 16)
    moved = PGD(eps=0.1, steps=4)(subject.model, subject.x, subject.y, ids=subject.ids)
    loss = torch.nn.functional.cross_entropy(subject.model(moved), subject.y).detach()
    assert float(rows[-1]["loss"]) == pytest.approx(float(loss), abs=1e-4)
    assert float(rows[-1]["loss"]) > float(rows[0]["loss"])


def test_normalised_epsilons_are_standard_deviations(tmp_path: Path) -> None:
    study("eps-sweep", [MODEL], {**FEW, "eps": [0.0, 0.2], "space": "normalised", "steps": 3}, tmp_path)
    rows = table(tmp_path / "table.csv")
    assert {row["space"] for row in rows} == {"normalised"}
    clean = float(rows[0]["accuracy"])
    subject = open_subject(MODEL, ["data.dataset=digits"], 24, 16)
    assert clean == pytest.approx(float((subject.model(subject.x).argmax(1) == subject.y).float().mean()))


def test_a_killed_study_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    settings = {**FEW, "eps": [0.0, 0.05, 0.1], "steps": 2}
    whole = study("eps-sweep", [MODEL], settings, tmp_path / "whole").read_text()
    study("eps-sweep", [MODEL], settings, tmp_path / "broken")
    lines = (tmp_path / "broken" / "rows.jsonl").read_text().splitlines()
    (tmp_path / "broken" / "rows.jsonl").write_text(lines[0] + "\n" + lines[1][:10])
    assert study("eps-sweep", [MODEL], settings, tmp_path / "broken").read_text() == whole


def test_another_study_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study("eps-sweep", [MODEL], {**FEW, "eps": [0.0], "steps": 1}, tmp_path)
    with pytest.raises(RunError, match="another study"):
        study("eps-sweep", [MODEL], {**FEW, "eps": [0.1], "steps": 1}, tmp_path)


@pytest.mark.parametrize(
    ("name", "targets", "settings", "error", "letter"),
    [
        ("eps-swep", [MODEL], {}, UnknownName, "did you mean 'eps-sweep'"),
        ("eps-sweep", [], {}, ConfigError, "at least one run"),
        ("eps-sweep", [MODEL], {"step": 3}, ConfigError, "did you mean 'steps'"),
        ("eps-sweep", [MODEL], {"space": "pixel"}, ConfigError, "one of pixels, normalised"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, name: str, targets: list[str], settings: Any, error: Any, letter: str
) -> None:
    with pytest.raises(error, match=letter):
        study(name, targets, settings, tmp_path)


def test_every_study_can_draw() -> None:
    assert set(studies) == {"attack-convergence", "attack-effectiveness", "eps-sweep"}
    assert all(callable(studies[name].draw) for name in studies)


def test_rows_of_another_model_under_the_same_name_are_refused(tmp_path: Path) -> None:
    settings = {**FEW, "eps": [0.01], "steps": 1}
    rows: list[dict[str, Any]] = []
    study("eps-sweep", [MODEL], settings, tmp_path, on_row=rows.append)
    assert [row["eps"] for row in rows] == [0.01]
    assert study("eps-sweep", [MODEL], settings, tmp_path).exists()
    known = (tmp_path / "subjects.json").read_text()
    (tmp_path / "subjects.json").write_text(known.replace('"weights": "', '"weights": "0'))
    with pytest.raises(RunError, match=r"with other weights \(0.*Choose another folder"):
        study("eps-sweep", [MODEL], settings, tmp_path)
