"""README's rows for those who come from another library are equivalents, by the other library's own defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vitruvius.analysis import explain
from vitruvius.attacks import PGD
from vitruvius.evaluation.threats import make_threat

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ROWS = [line for line in README.partition("## Coming from")[2].partition("\n## ")[0].splitlines() if "| " in line]


def row(word: str) -> str:
    """What README writes for ours beside the row that holds this word of theirs."""
    (found,) = (line.split(" | ")[1] for line in ROWS if word in line.split(" | ")[0])
    return found


def small_classifier() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)
    ).eval()


def test_every_threat_that_the_rows_write_is_one() -> None:
    threats = [spec for line in ROWS for spec in re.findall(r'"(autoattack[^"]*)"', line)]
    assert len(threats) == 3
    for spec in threats:
        assert make_threat(spec).eps == 8 / 255
    short = make_threat(next(spec for spec in threats if "custom" in spec))
    assert [stage.steps for _, stage in short.stages()[:3]] == [10, 10, 10]


def test_foolbox_steps_by_a_thirtieth_and_a_fortieth_of_the_radius() -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed")
    attacks = foolbox.attacks
    assert attacks.LinfPGD().rel_stepsize == pytest.approx(1 / 30)
    assert attacks.L2PGD().rel_stepsize == pytest.approx(1 / 40)
    assert "step_size=8 / 255 / 30" in row("LinfPGD")
    assert "ε/40" in row("LinfPGD")
    model = small_classifier()
    x, y = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    theirs = attacks.LinfPGD(steps=10, random_start=False)
    _, moved, _ = theirs(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=8 / 255)
    ours = PGD(eps=8 / 255, steps=10, step_size=8 / 255 / 30, random_start=False)(model, x, y)
    torch.testing.assert_close(ours, moved)


def test_torchattacks_makes_ten_white_box_steps_where_the_standard_has_a_hundred() -> None:
    torchattacks = pytest.importorskip("torchattacks", reason="torchattacks is not installed")
    for name in ("APGD", "APGDT", "FAB"):
        assert inspect.signature(getattr(torchattacks, name)).parameters["steps"].default == 10
    assert "steps" not in inspect.getsource(torchattacks.AutoAttack.__init__).replace("n_steps", "")
    assert "10 steps where the standard's make 100" in row("torchattacks `AutoAttack")
    assert [stage.steps for _, stage in make_threat("autoattack:eps=8/255").stages()[:3]] == [100, 100, 100]


def test_captum_takes_fifty_steps() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    assert inspect.signature(captum.IntegratedGradients.attribute).parameters["n_steps"].default == 50
    assert '"integrated_gradients:steps=50"' in row("IntegratedGradients")
    assert callable(explain)
