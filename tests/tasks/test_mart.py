"""MART against a slow loop over images and classes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hardened import grad_of, small, some_digits
from torch import Tensor

from vitruvius.tasks.mart import Mart, runner_up


def slow_mart(clean: Tensor, moved: Tensor, y: Tensor, beta: float) -> Tensor:
    """Equation by equation, an image at a time."""
    losses = []
    for z, w, label in zip(clean.double(), moved.double(), y.tolist(), strict=True):
        p, q = z.softmax(0), w.softmax(0)
        rival = max((float(q[k].detach()), k) for k in range(len(q)) if k != label)[1]
        boosted = -q[label].log() - (1 - q[rival]).log()
        gap = sum(p[k] * (p[k].log() - q[k].log()) for k in range(len(p)))
        losses.append(boosted + beta * gap * (1 - p[label]))
    return torch.stack(losses).mean()


def test_loss_and_gradient_are_the_slow_loops() -> None:
    model, (x, y) = small(), some_digits()
    task = Mart(model, eps=0.1, beta=5.0, attack="pgd:steps=1")
    torch.manual_seed(0)
    attacked = task.disturb(x, y)
    torch.manual_seed(0)
    result = task(x, y)
    found = grad_of(result["loss"], model)
    slow = slow_mart(model(x), model(attacked), y, 5.0)
    torch.testing.assert_close(result["loss"].detach(), slow.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, grad_of(slow, model), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(result["output"], model(attacked))


def test_a_hard_label_is_a_soft_one_with_all_its_weight() -> None:
    model, (x, y) = small(), some_digits()
    task = Mart(model, eps=0.1, attack={"use": "pgd", "steps": 1, "random_start": False})
    torch.testing.assert_close(task(x, F.one_hot(y, 10).float())["loss"], task(x, y)["loss"])


def test_a_rival_that_is_certain_gives_a_finite_loss() -> None:
    logits = torch.tensor([[0.0, 60.0, -60.0]], requires_grad=True)
    loss = runner_up(logits, torch.tensor([0]))
    loss.backward()
    assert math.isclose(float(loss.detach()), 60.0, rel_tol=1e-5)
    assert bool(torch.isfinite(logits.grad).all())
