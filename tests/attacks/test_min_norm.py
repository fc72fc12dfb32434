"""Carlini & Wagner, HopSkipJump, SPSA and noise against things that are known exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attacked import accuracy, digits_cnn, labels_of, linear_problem, small_net, some_images
from torch import Tensor, nn

from vitruvius._random import Dice
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.base import LINF, MARGIN, Norm
from vitruvius.attacks.carlini import Carlini
from vitruvius.attacks.fab import dual_length
from vitruvius.attacks.hopskipjump import HopSkipJump
from vitruvius.attacks.noise import GaussianNoise, UniformNoise
from vitruvius.attacks.norms import L2
from vitruvius.attacks.spsa import SPSA


def test_carlini_finds_the_exact_distance_to_a_linear_boundary() -> None:
    net, x, y, w = linear_problem()
    moved = Carlini(steps=200, search_steps=6, lr=0.02)(net, x, y)
    exact = MARGIN(net(x), y).abs() / w.norm()
    assert accuracy(net, moved, y) == 0
    torch.testing.assert_close(L2.length(moved - x), exact.detach(), rtol=0.03, atol=1e-3)


def test_carlini_moves_pixels_that_are_black_or_white() -> None:
    """Their place in tanh space is beyond the image by rounding, where they once had no gradient and stayed."""
    net, x, y = digits_cnn()
    x, y = x[:4], y[:4]
    moved = Carlini(steps=60, search_steps=4, lr=0.1)(net, x, y)
    black = x == 0
    assert float((moved[black] > 0.02).double().mean()) > 0.05


def test_carlini_leaves_an_image_that_has_stopped_falling_and_comes_as_near() -> None:
    net, x, y = digits_cnn()
    asked: list[int] = []
    net.register_forward_pre_hook(lambda module, inputs: asked.append(len(inputs[0])))
    plain = Carlini(steps=200, search_steps=4, lr=0.05, abort_early=False)
    found = [attack(net, x[:6], y[:6]) for attack in (replace(plain, abort_early=True), plain)]
    assert sum(asked) < 1.95 * 6 * 200 * 4
    near, full = (L2.length(moved - x[:6]) for moved in found)
    assert accuracy(net, found[0], y[:6]) == 0
    assert float(near.mean()) <= 1.02 * float(full.mean())


def test_carlini_with_confidence_wins_by_that_many_logits() -> None:
    net, x, y, _ = linear_problem()
    moved = Carlini(steps=100, search_steps=5, confidence=0.5, lr=0.05)(net, x, y)
    assert float(MARGIN(net(moved), y).detach().min()) >= 0.5 - 1e-4


@pytest.mark.parametrize("norm", [L2, LINF], ids=str)
def test_hopskipjump_closes_in_on_a_linear_boundary_seeing_only_classes(norm: Norm) -> None:
    net, x, y, w = linear_problem()
    moved = HopSkipJump(eps=10.0 if norm is L2 else 1.0, norm=norm, steps=12, first_queries=60)(net, x, y)
    exact = (MARGIN(net(x), y).abs() / dual_length(norm, w)).detach()
    assert accuracy(net, moved, y) == 0
    assert bool((norm.length(moved - x) < 1.6 * exact + 0.01).all())


def test_hopskipjump_never_reads_more_than_the_predicted_class() -> None:
    net, x, y, _ = linear_problem()

    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(net(x).argmax(1), 2).float()

    attack = HopSkipJump(eps=1.0, steps=2, first_queries=20)
    torch.testing.assert_close(attack(Classes().eval(), x, y), attack(net, x, y))


def test_spsa_estimates_the_gradient_at_the_perturbed_point() -> None:
    """On a network that is quadratic in the image the gradient depends on the point, and the estimate follows it."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 27, generator=generator)

    class Quadratic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).square() @ w.T

    x = torch.rand(2, 3, 3, 3, generator=generator)
    y = torch.zeros(2, dtype=torch.long)
    attack, dice = SPSA(eps=0.5, samples=4000, group=500), Dice(torch.arange(2))
    for point in (x, (x + 0.3).clamp(0, 1)):
        exact = 2 * point * (w[1] - w[0]).view(3, 3, 3)
        estimate = attack.estimate(Quadratic(), point, y, dice, 1)
        cosine = torch.cosine_similarity(estimate.flatten(1), exact.flatten(1))
        assert float(cosine.min()) > 0.98


def test_spsa_lowers_accuracy_without_gradients() -> None:
    net, (x, _) = small_net(seed=2), some_images(10)
    y = labels_of(net, x)
    assert accuracy(net, SPSA(eps=0.2, steps=20, samples=32)(net, x, y), y) < accuracy(
        net, UniformNoise(eps=0.2)(net, x, y), y
    )


def test_black_boxes_do_not_beat_white_boxes_on_the_digits() -> None:
    net, x, y = digits_cnn()
    x, y = x[:20], y[:20]
    white = accuracy(net, APGD(eps=1.0, norm="l2", steps=50, restarts=2)(net, x, y), y)
    assert white <= accuracy(net, HopSkipJump(eps=1.0, steps=3, first_queries=40)(net, x, y), y)
    assert white - 0.101 <= accuracy(net, Carlini(eps=1.0, steps=100, search_steps=4, lr=0.05)(net, x, y), y)


def test_noise_has_the_size_it_says() -> None:
    net, x = small_net(), torch.full((200, 3, 6, 6), 0.5)
    y = torch.zeros(200, dtype=torch.long)
    uniform = UniformNoise(eps=0.3)(net, x, y, ids=torch.arange(200)) - x
    assert abs(float(uniform.std()) - 0.3 / 3**0.5) < 2e-3
    normal = GaussianNoise(eps=1.0, std=0.1)(net, x, y, ids=torch.arange(200)) - x
    assert abs(float(normal.std()) - 0.1) < 1e-3
