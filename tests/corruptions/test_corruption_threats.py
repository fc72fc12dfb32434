"""Corruptions as threats: how they are asked for, what they are called, and that evaluation knows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitruvius
from vitruvius._errors import ConfigError, UnknownName
from vitruvius.attacks.base import Attack
from vitruvius.cli import main
from vitruvius.corruptions.base import BENCHMARK, EXTRA, corruption_grid, corruptions
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import Report, describe, evaluate, evaluate_shift, make_threat
from vitruvius.evaluation.shift_report import ShiftReport, load_shift_report
from vitruvius.evaluation.threats import make_threats
from vitruvius.report import write_page
from vitruvius.shifts import open_shift


def test_a_corruption_is_asked_for_by_its_name_or_as_corrupt() -> None:
    assert make_threat("fog:severity=3,seed=2") == corruptions["fog"](severity=3, seed=2)
    assert make_threat("corrupt:name=fog,severity=3") == corruptions["fog"](severity=3)
    assert make_threat("frost:severity=1,textures=photos") == corruptions["frost"](severity=1, textures="photos")


def test_the_plural_means_the_whole_benchmark() -> None:
    made: list[Any] = make_threats("corruptions")
    assert [(one.name, one.severity) for one in made] == [(name, s) for name in BENCHMARK for s in (1, 2, 3, 4, 5)]
    some: list[Any] = make_threats("corruptions:group=extra,severities=[2,4],scale=cifar")
    assert [(one.name, one.severity, one.scale) for one in some] == [(n, s, "cifar") for n in EXTRA for s in (2, 4)]


def test_gaussian_noise_with_an_eps_is_still_the_attack() -> None:
    assert isinstance(make_threat("gaussian_noise:eps=8/255"), Attack)
    assert make_threat("gaussian_noise:severity=2") == corruptions["gaussian_noise"](severity=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fogg:severity=3", "no corruption named 'fogg'; did you mean 'fog'?"),
        ("fog", "fog.severity is missing"),
        ("fog:severity=9", "expected a whole number from 1 to 5"),
        ("fog:severity=3,density=2", "unknown key 'fog.density'"),
        ("corrupt:severity=3", "corrupt needs a name"),
        ("corruptions", "'corruptions' means 75 threats; expected one"),
        ("corruptions:group=some", "one of benchmark, extra, all"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises((ConfigError, UnknownName), match=said.replace("?", r"\?")):
        make_threat(text)


def test_a_group_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no group of corruptions named 'bench'; did you mean 'benchmark'"):
        corruption_grid(group="bench")  # type: ignore[arg-type]


def test_reports_call_corruptions_by_their_names() -> None:
    blur = corruptions["glass_blur"](severity=2)
    assert (blur.name, describe(blur)) == ("glass_blur", "glass_blur(severity=2)")
    assert describe(corruptions["fog"](severity=1, seed=4)) == "fog(severity=1, seed=4)"


def test_an_evaluation_under_corruptions_does_not_depend_on_batches(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)).eval()
    x, y = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    threats = [corruptions[name](severity=s) for name in ("snow", "shot_noise") for s in (1, 5)]
    answers = []
    for size in (10, 3):
        batches = [(x[i : i + size], y[i : i + size]) for i in range(0, 10, size)]
        report = vitruvius.evaluate(model, batches, threats, folder=tmp_path / str(size))
        answers.append({score.spec: report.ledger.columns[score.spec]["loss"] for score in report.threats})
    assert list(answers[0]) == ["clean", *map(describe, threats)]
    for spec, losses in answers[0].items():
        torch.testing.assert_close(answers[1][spec], losses)


def judged(tmp_path: Path, *threats: str) -> tuple[Report, ShiftReport]:
    loader = eval_loader(DataConfig(val_num_samples=12, batch_size=6), input_size=(3, 8, 8))
    report = evaluate(vitruvius.create_model("vitruvius/vit_digits", depth=1).eval(), loader, threats, folder=tmp_path)
    return report, load_shift_report(tmp_path / "shifts" / "corruptions" / "report.json")


def test_drawn_frost_says_so_wherever_its_figures_stand(tmp_path: Path) -> None:
    report, kept = judged(tmp_path / "evaluation", "frost:severity=3", "fog:severity=3")
    table = str(report).splitlines()
    assert any(line.startswith("frost (drawn) ") for line in table)
    assert any(line.startswith("fog ") for line in table)
    assert [line for line in table if line.startswith("note: frost is drawn")]
    saved = json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert [score["drawn"] for score in saved["threats"]] == [False, True, False]
    assert any(remark.startswith("frost is drawn") for remark in saved["remarks"])
    assert kept.drawn == ["frost"]
    assert "frost (drawn)" in str(kept)
    assert any(remark.startswith("frost is drawn") for remark in kept.remarks)
    (tmp_path / "config.yaml").write_text("model: {name: vitruvius/vit_digits}\n")
    page = write_page([tmp_path], tmp_path / "page.html").read_text()
    assert "frost (drawn)" in page
    assert "Drawn: in place of the photographs" in page


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """A folder with one photograph of frost."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (60, 60), (200, 210, 250)).save(tmp_path / "photos" / "frost1.png")
    return str(tmp_path / "photos")


def test_photographed_frost_is_not_called_drawn(tmp_path: Path, photos: str) -> None:
    report, kept = judged(tmp_path / "out", f"frost:severity=3,textures={photos}")
    assert "drawn" not in str(report)
    assert kept.drawn == []
    assert report.remarks == []


@pytest.mark.parametrize("photographs", [False, True])
def test_a_copy_that_is_read_back_knows_how_its_frost_was_made(tmp_path: Path, photos: str, photographs: bool) -> None:
    words = ["corrupt", "digits", "--corruptions", "frost,fog", "--images", "4", "--workers", "1", "--out"]
    assert main([*words, str(tmp_path / "copy"), *(["--textures", photos] if photographs else [])]) == 0
    shift = open_shift(f"cifar-10-c:{tmp_path / 'copy'}")
    assert shift.drawn == (() if photographs else ("frost",))
    model = vitruvius.create_model("vitruvius/vit_digits", depth=1).eval()
    text = str(evaluate_shift(model, shift, data=DataConfig(batch_size=4)))
    assert ("frost (drawn)" in text) == (not photographs)
    assert ("note: frost is drawn" in text) == (not photographs)


def test_a_copy_without_frost_and_a_published_set_are_not_drawn(tmp_path: Path) -> None:
    for name, out in (("fog", "a"), ("frost", "b")):
        words = f"corrupt digits --corruptions {name} --images 4 --workers 1 --out".split()
        assert main([*words, str(tmp_path / out)]) == 0
    assert open_shift(f"cifar-10-c:{tmp_path / 'a'}").drawn == ()
    (tmp_path / "b" / "corrupt.json").unlink()  # as a published set, which has none
    assert open_shift(f"cifar-10-c:{tmp_path / 'b'}").drawn == ()
