"""The study of the released attack protocol: four ways to attack, each what a plain loop says it is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from small_run import all_images, small_run
from vitruvius._errors import ConfigError
from vitruvius._files import load_tensors
from vitruvius.studies import study
from vitruvius.studies._base import open_subject

EPS = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(
        tmp_path_factory.mktemp("protocol") / "run", "model.mean=[0.3, 0.3, 0.3]", "model.std=[0.25, 0.25, 0.25]"
    )


def table(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["space"], row["labels"]): row for row in csv.DictReader(path.read_text().splitlines())}


def ascend(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, eps: float, steps: int) -> Tensor:
    """CleverHans's projected gradient descent in the largest norm, without clipping, from a given start."""
    point = start
    for _ in range(steps):
        point = point.detach().requires_grad_()
        torch.nn.functional.cross_entropy(model(point), y).backward()
        point = x + (point + 0.15 * eps * point.grad.sign() - x).clamp(-eps, eps)
    return point.detach()


def test_all_four_ways_are_told_and_their_answers_kept(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "eps": [EPS], "steps": 3}
    rows = table(study("released-protocol", [str(run)], settings, tmp_path))
    assert set(rows) == {(space, labels) for space in ("pixels", "normalised") for labels in ("true", "predicted")}
    _, y, ids = all_images(open_subject(str(run), [], 24, 128))
    for (space, labels), row in rows.items():
        (file,) = tmp_path.rglob(f"{space}_{labels}_*.safetensors")
        columns, about = load_tensors(file)
        assert about["key"] == f"{space}/{labels}/{EPS:g}"
        assert torch.equal(columns["id"], ids)
        assert torch.equal(columns["correct"], columns["prediction"] == y)
        assert float(row["accuracy"]) == pytest.approx(float(columns["correct"].double().mean()))
        assert int(row["n"]) == 24
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_released_way_is_that_of_its_code(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the random start, which is drawn otherwise there."""
    monkeypatch.setattr("vitruvius.attacks.pgd.PGD.start", lambda self, x, dice, restart=0: x)
    settings = {"images": 24, "eps": [EPS], "spaces": ["normalised"], "labels": ["predicted"]}
    rows = table(study("released-protocol", [str(run)], settings, tmp_path))
    subject = open_subject(str(run), [], 24, 128)
    images = (all_images(subject)[0] - 0.3) / 0.25
    model = subject.model.model
    answers = model(images).argmax(1)
    moved = ascend(model, images, answers, images, EPS, 20)
    assert float((moved * 0.25 + 0.3).amin()) < 0  # it leaves the image
    (file,) = tmp_path.rglob("normalised_predicted_*.safetensors")
    assert torch.equal(load_tensors(file)[0]["prediction"], model(moved).argmax(1))
    assert list(rows) == [("normalised", "predicted")]


def test_fgsm_in_the_released_way_is_one_step_from_the_normalised_image(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "eps": [EPS], "threat": "fgsm", "spaces": ["normalised"], "labels": ["predicted"]}
    rows = table(study("released-protocol", [str(run)], settings, tmp_path))
    subject = open_subject(str(run), [], 24)
    x, y, _ = all_images(subject)
    images = ((x - 0.3) / 0.25).requires_grad_()
    model = subject.model.model
    answers = model(images)
    torch.nn.functional.cross_entropy(answers, answers.argmax(1).detach()).backward()
    moved = images + EPS * images.grad.sign()
    expected = (model(moved).argmax(1) == y).double().mean()
    assert float(rows["normalised", "predicted"]["accuracy"]) == pytest.approx(float(expected))
    with pytest.raises(ConfigError, match="fgsm"):
        study("released-protocol", [str(run)], {**settings, "steps": 3}, tmp_path / "steps")


def test_predicted_labels_can_push_a_wrong_answer_into_the_right_class(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "eps": [0.8], "spaces": ["pixels"]}
    rows = table(study("released-protocol", [str(run)], settings, tmp_path))
    subject = open_subject(str(run), [], 24, 128)
    x, y, _ = all_images(subject)
    wrong = subject.model(x).argmax(1) != y
    found = {}
    for labels in ("true", "predicted"):
        (file,) = tmp_path.rglob(f"pixels_{labels}_*.safetensors")
        found[labels] = int((load_tensors(file)[0]["correct"] & wrong).sum())
    assert found["true"] == 0
    assert found["predicted"] > 0
    assert float(rows["pixels", "predicted"]["accuracy"]) > float(rows["pixels", "true"]["accuracy"])


@pytest.mark.parametrize(("key", "value"), [("spaces", ["pixel"]), ("labels", ["own"])])
def test_a_misspelt_way_is_refused(run: Path, tmp_path: Path, key: str, value: list[str]) -> None:
    with pytest.raises(ConfigError, match=value[0]):
        study("released-protocol", [str(run)], {"images": 8, key: value}, tmp_path / "out")
    assert not (tmp_path / "out" / "rows.jsonl").exists()
