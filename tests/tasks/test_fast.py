"""Single-step training: RS-FGSM and N-FGSM by hand, gradient alignment against a slow loop, free replays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hardened import grad_of, small, some_digits
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._random import Dice
from vitruvius.attacks.base import LINF
from vitruvius.attacks.norms import L2
from vitruvius.attacks.pgd import PGD
from vitruvius.tasks.fast import METHODS, Fast, NoisyFGSM, misalignment
from vitruvius.tasks.free import Free


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 10))


def test_rs_fgsm_is_one_step_of_pgd_with_a_longer_step() -> None:
    model, (x, y), ids = net(), some_digits(), torch.arange(6)
    rs = NoisyFGSM(eps=0.1, **METHODS["rs_fgsm"])
    dice = Dice(ids, 0, "PGD")
    one = PGD(eps=0.1, steps=1, step_size=0.125)(model, x, y, ids=ids)
    torch.testing.assert_close(rs.search(model, x, y, dice), one)


def test_n_fgsm_starts_in_a_larger_ball_and_does_not_come_back() -> None:
    model, (x, y), dice = net(), some_digits(40), Dice(torch.arange(40))
    x = x * 0.2 + 0.4
    noise = 2 * 0.05 * (2 * dice.uniform("linf", x.shape[1:]) - 1)
    start = (x + noise).requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(start), y), start)
    found = NoisyFGSM(eps=0.05, **METHODS["n_fgsm"]).search(model, x, y, dice)
    torch.testing.assert_close(found, (start + 0.05 * grad.sign()).detach())
    assert 0.1 < float((found - x).abs().max()) <= 0.15 + 1e-6


def slow_misalignment(model: nn.Module, x: Tensor, there: Tensor, y: Tensor) -> Tensor:
    apart = []
    for image, other, label in zip(x, there, y, strict=True):
        grads = []
        for point in (image, other):
            point = point[None].detach().requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(model(point), label[None]), point, create_graph=True)
            grads.append(grad.flatten())
        apart.append(1 - grads[0] @ grads[1] / (grads[0].norm() * grads[1].norm()))
    return torch.stack(apart).mean()


@pytest.mark.parametrize("attention", [False, True])
def test_misalignment_and_its_gradient_are_the_slow_loops(attention: bool) -> None:
    model, (x, y) = small().eval() if attention else net(), some_digits(3)
    torch.manual_seed(0)
    dice = Dice(torch.randint(2**62, (3,)), owner="alignment")
    fast = misalignment(model, x, y, norm=LINF, eps=0.3, dice=dice)
    found = grad_of(fast, model)
    there = (x + LINF.random(x, 0.3, dice)).clamp(0, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        slow = slow_misalignment(model, x, there, y)
        expected = grad_of(slow, model)
    torch.testing.assert_close(fast.detach(), slow.detach(), rtol=1e-4, atol=1e-6)
    for key, grad in found.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-3, atol=1e-5)
    assert float(fast.detach()) > 1e-4


def test_a_linear_model_is_aligned() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    x, _ = some_digits()
    gap = misalignment(model, x, torch.ones(6, dtype=torch.int64), norm=L2, eps=1.0, dice=Dice(torch.arange(6)))
    assert abs(float(gap.detach())) < 1e-5


def test_the_guard_adds_its_weight_to_the_loss_and_needs_no_fused_attention() -> None:
    model, batch = small(), some_digits()
    results = []
    for align in (0.0, 2.0):
        torch.manual_seed(0)
        results.append(Fast(model, eps=0.1, align=align)(*batch))
    torch.testing.assert_close(results[1]["loss"], results[0]["loss"] + 2 * results[1]["misalignment"])
    results[1]["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.training
    with pytest.raises(ConfigError, match=r"task.align = -1"):
        Fast(model, eps=0.1, align=-1.0)


def test_noise_and_step_may_be_chosen() -> None:
    attack = Fast(small(), eps=0.1, method="rs_fgsm", noise=0.5, step=1.0).inner.attack
    assert attack == NoisyFGSM(eps=0.1, noise=0.5, step=1.0, project=True)


# free


def slow_free(model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, eps: float, replays: int) -> Tensor:
    """Algorithm 1: a gradient for the weights, the same one for delta; plain SGD."""
    for _ in range(replays):
        point = (x + delta).clamp(0, 1).requires_grad_()
        loss = F.cross_entropy(model(point), y)
        grads = torch.autograd.grad(loss, [point, *model.parameters()])
        delta = (delta + eps * grads[0].sign()).clamp(-eps, eps).detach()
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads[1:], strict=True):
                p -= 0.1 * grad
    return delta


@pytest.mark.parametrize("carry", [True, False])
def test_free_replays_are_algorithm_1(carry: bool) -> None:
    ours, theirs, (x, y) = net(), net(), some_digits()
    task = Free(ours, eps=0.1, replays=3, carry=carry)
    assert task.replays == 3
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    delta = torch.empty(0)
    for batch in range(2):
        for replay in range(3):
            torch.manual_seed(batch)
            if replay == 0 and (batch == 0 or not carry):
                dice = Dice(torch.randint(2**62, (6,)), owner="free")
                delta = 0.1 * (2 * dice.uniform("linf", x.shape[1:]) - 1)
                torch.manual_seed(batch)
            optimizer.zero_grad()
            task(x, y)["loss"].backward()
            optimizer.step()
        delta = slow_free(theirs, x, y, delta, 0.1, 3)
        torch.testing.assert_close(task.delta, delta)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_delta_of_free_training_is_part_of_its_state_and_follows_smaller_batches() -> None:
    x, y = some_digits()
    task = Free(net(), eps=0.1, replays=2)
    task(x, y)["loss"].backward()
    before = task.get_task_state()["delta"].clone()
    task(x[:4], y[:4])["loss"].backward()
    assert torch.equal(task.delta[4:], before[4:])
    assert not torch.equal(task.delta[:4], before[:4])
    other = Free(net(), eps=0.1, replays=2)
    other.load_task_state(task.get_task_state())
    torch.testing.assert_close(other(x, y)["loss"], task(x, y)["loss"])
    assert Free(net(), eps=0.1, carry=False).get_task_state() == {}


def test_free_without_eps_is_supervised_and_a_gradient_of_nan_moves_nothing() -> None:
    x, y = some_digits()
    model = net()
    task = Free(model, eps=0.1, schedule={"use": "linear", "epochs": 5})
    torch.testing.assert_close(task(x, y)["loss"], F.cross_entropy(model(x), y))
    task.at(epoch=5, update=0, updates_per_epoch=1)
    task(x, y)
    before = task.delta.clone()
    task._climb(torch.full_like(x, torch.nan))
    torch.testing.assert_close(task.delta, before)
    with pytest.raises(ConfigError, match=r"task.replays = 0"):
        Free(model, eps=0.1, replays=0)
