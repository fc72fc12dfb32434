"""TRADES beyond its golden losses: what its attack climbs, what it refuses, two processes as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hardened import gradients, small, some_digits
from torch import Tensor

from two_processes import in_two_processes
from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError
from vitruvius._processes import process_group
from vitruvius.attacks.pgd import PGD
from vitruvius.tasks import tasks
from vitruvius.tasks.trades import Trades


def test_the_inner_attack_climbs_the_divergence_from_the_clean_answer() -> None:
    model, (x, y) = small(), some_digits()
    task = Trades(model, eps=0.1, attack="pgd:steps=2")
    with in_eval_mode(model):
        p = model(x).softmax(1).detach()
    torch.manual_seed(0)
    attacked = task.disturb(x, y)
    torch.manual_seed(0)
    assert torch.equal(task.disturb(x, (y + 1) % 10), attacked)  # labels do not matter to it
    torch.manual_seed(0)
    ids = torch.randint(2**62, (len(x),))
    with in_eval_mode(model):
        assert torch.equal(PGD(eps=0.1, steps=2, loss="kl")(model, x, p, ids=ids), attacked)


def test_the_loss_is_the_slow_formula_on_soft_labels_too() -> None:
    model, (x, y) = small(), some_digits()
    soft = 0.6 * F.one_hot(y, 10) + 0.04
    task = Trades(model, eps=0.1, beta=3.0, attack="pgd:steps=1")
    torch.manual_seed(0)
    attacked = task.disturb(x, soft)
    torch.manual_seed(0)
    result = task(x, soft)
    clean, moved = model(x).softmax(1), model(attacked).softmax(1)
    slow = torch.stack([(p * (p.log() - q.log())).sum() for p, q in zip(clean, moved, strict=True)]).mean()
    natural = -(soft * clean.log()).sum(1).mean()
    torch.testing.assert_close(result["loss"], natural + 3 * slow)
    torch.testing.assert_close(result["divergence"], slow.detach())


@pytest.mark.parametrize("attack", ["targeted_pgd", "apgd", "fgsm", {"use": "pgd", "loss": "ce"}], ids=str)
def test_attacks_that_aim_at_labels_and_other_losses_are_refused(attack: Any) -> None:
    with pytest.raises(ConfigError, match="trades climbs the divergence"):
        Trades(small(), eps=0.1, attack=attack)


FIXED = {"use": "pgd", "steps": 1, "random_start": False}


def loss_and_gradients(name: str, batch: tuple[Tensor, Tensor], process: Any = None) -> tuple[float, dict[str, Tensor]]:
    model = small()
    task: Any = tasks[name](model, eps=0.1, norm="l2", attack=FIXED)
    if process is not None:
        task.prepare_distributed()
    loss = task(*batch)["loss"]
    loss.backward()
    return loss.item(), gradients(model)


def half(rank: int, name: str, folder: str) -> None:
    with process_group("cpu") as process:
        x, y = some_digits(8)
        torch.save(loss_and_gradients(name, (x[rank::2], y[rank::2]), process), f"{folder}/{rank}.pt")


@pytest.mark.parametrize("name", ["adversarial", "mart"])
def test_two_processes_have_the_gradient_of_one(name: str, tmp_path: Path) -> None:
    loss, expected = loss_and_gradients(name, some_digits(8))
    in_two_processes(half, name, str(tmp_path))
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert sum(part[0] for part in halves) / 2 == pytest.approx(loss, rel=1e-5)
    for part in halves:
        torch.testing.assert_close(part[1], expected, rtol=1e-4, atol=1e-6)
