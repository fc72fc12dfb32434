"""Real attacks of torchattacks, foolbox, ART and secml-torch, given to `evaluate`; skipped where not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacked import digits_cnn
from torch import nn

import vitruvius
from vitruvius.attacks.adapters import Foreign, FromART, FromFoolbox, FromSecML, FromTorchattacks
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import describe

EPS, STEPS, STEP = 0.15, 5, 0.05
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def torchattacks() -> Foreign:
    theirs = pytest.importorskip("torchattacks", reason="torchattacks is not installed (extra library-tests)")
    return FromTorchattacks(
        make=lambda model: theirs.PGD(model, eps=EPS, alpha=STEP, steps=STEPS, random_start=False), eps=EPS
    )


def foolbox() -> Foreign:
    theirs = pytest.importorskip("foolbox", reason="foolbox is not installed (extra library-tests)")

    def make(model: nn.Module) -> Any:
        attack = theirs.attacks.LinfPGD(rel_stepsize=None, abs_stepsize=STEP, steps=STEPS, random_start=False)
        return attack, theirs.PyTorchModel(model, bounds=(0, 1))

    return FromFoolbox(make=make, eps=EPS)


def art() -> Foreign:
    reason = "adversarial-robustness-toolbox is not installed (extra library-tests)"
    attacks = pytest.importorskip("art.attacks.evasion", reason=reason)
    estimators = pytest.importorskip("art.estimators.classification", reason=reason)

    def make(model: nn.Module) -> Any:
        classifier = estimators.PyTorchClassifier(
            model, loss=nn.CrossEntropyLoss(), input_shape=(3, 8, 8), nb_classes=10, clip_values=(0, 1)
        )
        settings: dict[str, Any] = {"eps": EPS, "eps_step": STEP, "max_iter": STEPS, "verbose": False}
        return attacks.ProjectedGradientDescent(classifier, **settings)

    return FromART(make=make, eps=EPS)


def secml() -> Foreign:
    reason = "secml-torch is not installed (extra library-tests)"
    attacks = pytest.importorskip("secmlt.adv.evasion.pgd", reason=reason)
    models = pytest.importorskip("secmlt.models.pytorch.base_pytorch_nn", reason=reason)

    def make(model: nn.Module) -> Any:
        settings: dict[str, Any] = {"epsilon": EPS, "num_steps": STEPS, "step_size": STEP}
        attack = attacks.PGD("linf", **settings, random_start=False, backend="native")
        return attack, models.BasePyTorchClassifier(model)

    return FromSecML(make=make, eps=EPS)


@pytest.mark.parametrize("library", [torchattacks, foolbox, art, secml])
def test_evaluate_judges_their_attack_as_it_judges_ours(library: Callable[[], Foreign], tmp_path: Path) -> None:
    """Without lots to draw it is the same attack; made again, it has the name under which its rows are kept."""
    model, x, y = digits_cnn()
    next(model.requires_grad_(False).parameters()).requires_grad_()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    theirs = library()
    ours = PGD(eps=EPS, steps=STEPS, step_size=STEP, random_start=False)
    report = vitruvius.evaluate(model, [(x[:40], y[:40]), (x[40:], y[40:])], [ours, theirs], folder=tmp_path)
    mine, other = report.threats[1:]
    assert 0 < other.accuracy == mine.accuracy < report.threats[0].accuracy
    assert " at 0x" not in describe(theirs)
    assert describe(library()) == describe(theirs) == other.spec

    assert [p.requires_grad for p in model.parameters()] == [True] + [False] * 7
    assert not model.training
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
