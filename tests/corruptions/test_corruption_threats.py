"""Corruptions as threats: how they are asked for, what they are called, and that evaluation knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from vitruvius._errors import ConfigError, UnknownName
from vitruvius.attacks import Attack
from vitruvius.corruptions import BENCHMARK, EXTRA, corruption_grid, corruptions
from vitruvius.evaluation import describe, make_threat, make_threats


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
        ("fog", "'fog' needs a value for severity"),
        ("fog:severity=9", "expected a whole number from 1 to 5"),
        ("fog:severity=3,density=2", "'fog' has no setting 'density'"),
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
    assert (blur.name, blur.label, describe(blur)) == ("glass_blur", "glass_blur 2", "glass_blur(severity=2)")
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
