"""DDN, DeepFool, MI-FGSM and NI-FGSM against their formulas, written out image by image, and exact distances."""

from __future__ import annotations

import math

import pytest
import torch
from attacked import accuracy, digits_cnn, labels_of, linear_problem, small_net, some_images
from torch import Tensor, nn

from vitruvius.attacks.base import LINF, MARGIN, Norm
from vitruvius.attacks.carlini import Carlini
from vitruvius.attacks.ddn import DDN
from vitruvius.attacks.deepfool import DeepFool
from vitruvius.attacks.fab import dual_length
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.momentum_fgsm import MIFGSM, NIFGSM
from vitruvius.attacks.norms import L2
from vitruvius.attacks.pgd import PGD


def gradient(net: nn.Module, x: Tensor, y: int) -> tuple[Tensor, int]:
    """Of the cross-entropy of one image (C, H, W), and the predicted class."""
    x = x.detach().requires_grad_()
    logits = net(x[None])
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor([y])), x)
    return grad, int(logits.argmax())


def test_ddn_finds_the_exact_distance_to_a_linear_boundary() -> None:
    net, x, y, w = linear_problem()
    moved = DDN(steps=200)(net, x, y)
    exact = (MARGIN(net(x), y).abs() / w.norm()).detach()
    assert accuracy(net, moved, y) == 0
    torch.testing.assert_close(L2.length(moved - x), exact, rtol=0.06, atol=1e-3)  # the radius swings by gamma


def slow_ddn(net: nn.Module, x: Tensor, y: int, steps: int, gamma: float) -> Tensor:
    """Algorithm 1 of the paper for one image, as foolbox has it."""
    delta, radius, best, best_length = torch.zeros_like(x), 1.0, torch.zeros_like(x), math.inf
    farthest = float(torch.maximum(x, 1 - x).norm())
    for k in range(steps):
        grad, predicted = gradient(net, x + delta, y)
        if predicted != y and float(delta.norm()) < best_length:
            best, best_length = delta, float(delta.norm())
        alpha = 0.01 + 0.99 * (1 + math.cos(math.pi * k / steps)) / 2
        delta = delta + alpha * grad / grad.norm()
        radius = min(radius * (1 - gamma if predicted != y else 1 + gamma), farthest)
        delta = (x + delta * radius / delta.norm()).clamp(0, 1) - x
    return x + best


def test_ddn_is_the_papers_algorithm() -> None:
    net, (x, _) = small_net(), some_images(5)
    y = labels_of(net, x)
    expected = torch.stack([slow_ddn(net, x[i], int(y[i]), 15, 0.1) for i in range(5)])
    torch.testing.assert_close(DDN(steps=15, gamma=0.1)(net, x, y), expected, rtol=0, atol=1e-5)


def test_ddn_comes_as_near_as_carlini_with_a_tenth_of_the_gradients() -> None:
    net, x, y = digits_cnn()
    x, y = x[:6], y[:6]
    ours, theirs = DDN(steps=50)(net, x, y), Carlini(steps=100, search_steps=5, lr=0.05)(net, x, y)
    assert accuracy(net, ours, y) == 0
    assert float(L2.length(ours - x).median()) <= 1.05 * float(L2.length(theirs - x).median())


def test_ddn_moves_where_there_is_no_gradient() -> None:
    class Steps(nn.Module):
        """Right about grey images, wrong about all others, flat everywhere."""

        def forward(self, x: Tensor) -> Tensor:
            moved = ((x - 0.5).flatten(1).abs().amax(1) > 0.01).float() + 0 * x.sum()
            return torch.stack([1 - moved, moved], 1)

    x, y = torch.full((3, 3, 4, 4), 0.5), torch.zeros(3, dtype=torch.long)
    assert accuracy(Steps(), DDN(steps=5)(Steps().eval(), x, y), y) == 0


@pytest.mark.parametrize("norm", [L2, LINF], ids=str)
def test_deepfool_finds_the_exact_distance_to_a_linear_boundary_plus_its_overshoot(norm: Norm) -> None:
    net, x, y, w = linear_problem()
    moved = DeepFool(norm=norm, overshoot=0.05)(net, x, y)
    exact = (MARGIN(net(x), y).abs() / dual_length(norm, w)).detach()
    assert accuracy(net, moved, y) == 0
    torch.testing.assert_close(norm.length(moved - x), 1.05 * (exact + 1e-4), rtol=1e-3, atol=1e-5)


def slow_deepfool(net: nn.Module, x: Tensor, y: int, steps: int, overshoot: float, order: float) -> Tensor:
    """Algorithm 2 of the paper for one image and all classes, as foolbox has it."""
    point, total = x, torch.zeros_like(x)
    for _ in range(steps):
        z = point.detach().requires_grad_()
        logits = net(z[None])[0]
        if int(logits.argmax()) != y:
            break
        nearest, step = math.inf, total
        for k in range(len(logits)):
            if k == y:
                continue
            (w,) = torch.autograd.grad(logits[k] - logits[y], z, retain_graph=True)
            dual = float(w.norm() if order == 2 else w.abs().sum())
            distance = abs(float((logits[k] - logits[y]).detach())) / (dual + 1e-8)
            if distance < nearest:
                nearest, step = distance, (distance + 1e-4) * (w / dual if order == 2 else w.sign())
        total = total + step
        point = (x + (1 + overshoot) * total).clamp(0, 1)
    return point


@pytest.mark.parametrize("norm", [L2, LINF], ids=str)
def test_deepfool_is_the_papers_algorithm(norm: Norm) -> None:
    net, (x, _) = small_net(), some_images(6)
    y = labels_of(net, x)
    order = 2 if norm == L2 else math.inf
    expected = torch.stack([slow_deepfool(net, x[i], int(y[i]), 8, 0.02, order) for i in range(6)])
    torch.testing.assert_close(DeepFool(norm=norm, steps=8)(net, x, y), expected, rtol=0, atol=1e-5)


def test_deepfool_needs_few_steps_and_no_more_than_its_candidates() -> None:
    net, x, y = digits_cnn()
    assert accuracy(net, DeepFool(steps=30, candidates=3)(net, x, y), y) == 0


def slow_momentum(net: nn.Module, x: Tensor, y: int, eps: float, steps: int, decay: float, ahead: bool) -> Tensor:
    """MI-FGSM and NI-FGSM for one image, as torchattacks has them."""
    point, momentum, alpha = x, torch.zeros_like(x), eps / steps
    for _ in range(steps):
        grad, _ = gradient(net, point + decay * alpha * momentum if ahead else point, y)
        momentum = grad / grad.abs().mean() + decay * momentum
        point = point + alpha * momentum.sign()
        point = (x + (point - x).clamp(-eps, eps)).clamp(0, 1)
    return point


@pytest.mark.parametrize(("kind", "ahead"), [(MIFGSM, False), (NIFGSM, True)])
def test_momentum_attacks_are_the_published_ones(kind: type[MIFGSM], ahead: bool) -> None:
    net, (x, y) = small_net(), some_images(5)
    expected = torch.stack([slow_momentum(net, x[i], int(y[i]), 0.1, 7, 0.8, ahead) for i in range(5)])
    torch.testing.assert_close(kind(eps=0.1, steps=7, decay=0.8)(net, x, y), expected, rtol=0, atol=1e-6)


def test_without_decay_momentum_is_iterated_fgsm_and_with_one_step_fgsm() -> None:
    net, (x, y) = small_net(), some_images()
    iterated = PGD(eps=0.1, steps=5, step_size=0.02, random_start=False)(net, x, y)
    torch.testing.assert_close(MIFGSM(eps=0.1, steps=5, decay=0)(net, x, y), iterated)
    torch.testing.assert_close(MIFGSM(eps=0.1, steps=1)(net, x, y), FGSM(eps=0.1)(net, x, y))


def test_momentum_attacks_transfer_better_than_pgd() -> None:
    """Made on one network, tried on another: what they are for."""
    source, target = small_net(seed=0, classes=3), small_net(seed=1, classes=3)
    x, _ = some_images(200, 3)
    with torch.no_grad():
        target[1].weight.copy_(0.8 * source[1].weight + 0.2 * target[1].weight)
        target[3].weight.copy_(source[3].weight)
    y = labels_of(source, x)
    momentum, plain = (attack(source, x, y) for attack in (MIFGSM(eps=0.02), PGD(eps=0.02, steps=10)))
    assert accuracy(target, momentum, y) <= accuracy(target, plain, y)
