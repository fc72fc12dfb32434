"""PGD and its relatives against the light recipe's golden iterates, and what restarts and best iterates promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attacked import GoldenNet, accuracy, digits_cnn, digits_vit, golden, labels_of, small_net, some_images
from torch import Tensor

from vitruvius.attacks.base import CE, KL, LINF
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.noise import UniformNoise
from vitruvius.attacks.norms import L2, L2Norm
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.targeted_pgd import TARGETS, TargetedPGD

NORMS = {"linf": LINF, "l2": L2Norm(floor=1e-10, slack=1e-7)}
CASES = [(norm, case) for norm in NORMS for case in golden(f"light_pgd_{norm}")[1]]


@pytest.mark.parametrize(("norm", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_iterates_and_losses_are_the_light_recipes(norm: str, case: dict[str, Any]) -> None:
    tensors, _, _ = golden(f"light_pgd_{norm}")
    name, kind = case["id"], TargetedPGD if case.get("targeted") else PGD
    attack = kind(
        eps=case["eps"],
        norm=NORMS[norm],
        steps=case["steps"],
        step_size=case["step"],
        bounds=tuple(case.get("bounds", (0.0, 1.0))),
    )
    y = tensors[f"{name}.targets"] if case.get("targeted") else tensors["y"]
    y = tensors[f"{name}.y_soft"] if case.get("soft") else y
    visited = list(attack.ascend(GoldenNet(tensors), tensors["x"], y, tensors[f"{name}.start"]))
    points = torch.stack([point for point, _ in visited[1:]])
    torch.testing.assert_close(points[[0, -1]], tensors[f"{name}.x_adv_steps"], rtol=0, atol=1e-12)
    losses = torch.stack([here.loss.sum() for _, here in visited if here is not None])
    sign = -1 if case.get("targeted") else 1
    torch.testing.assert_close(sign * losses, tensors[f"{name}.losses"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("load", "eps"), [(digits_cnn, 0.1), (digits_cnn, 0.2), (digits_vit, 0.15)], ids=["cnn 0.1", "cnn 0.2", "vit 0.15"]
)
def test_the_default_step_breaks_at_least_two_points_more_than_a_cautious_one(load: Any, eps: float) -> None:
    net, x, y = load()
    chosen = accuracy(net, PGD(eps=eps, steps=10)(net, x, y), y)
    cautious = accuracy(net, PGD(eps=eps, steps=10, step_size=1.5 * eps / 10)(net, x, y), y)
    assert chosen <= cautious - 0.02


def test_the_default_step_is_a_quarter_of_the_radius_and_longer_in_short_attacks() -> None:
    assert PGD(eps=0.4, steps=10).step_length() == PGD(eps=0.4, steps=100).step_length() == 0.1
    assert PGD(eps=0.4, steps=1).step_length() == pytest.approx(0.6)
    assert PGD(eps=0.4, step_size=0.3).step_length() == 0.3


def test_fgsm_is_one_step_of_pgd_from_the_image() -> None:
    net, (x, y) = small_net(), some_images()
    one = PGD(eps=0.1, steps=1, step_size=0.1, random_start=False)(net, x, y)
    torch.testing.assert_close(FGSM(eps=0.1)(net, x, y), one)


def test_with_radius_zero_pgd_returns_the_image() -> None:
    net, (x, y) = small_net(), some_images()
    assert torch.equal(PGD(eps=0.0)(net, x, y), x)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_model_is_asked_about_points_of_the_image_alone_the_random_start_included(norm: str) -> None:
    net = small_net()
    x, y = some_images()
    asked: list[Tensor] = []
    net.register_forward_pre_hook(lambda module, inputs: asked.append(inputs[0].detach()))
    PGD(eps=0.5, norm=norm, steps=2)(net, x.round(), y)  # black and white: every start would leave the image
    assert len(asked) >= 2
    assert all(points.min() >= 0 and points.max() <= 1 for points in asked)


def test_the_best_iterate_is_never_better_for_the_model_than_the_last() -> None:
    net, x, y = digits_cnn()
    last, best = (PGD(eps=0.15, steps=8, step_size=0.1, best=best)(net, x, y) for best in (False, True))
    losses = [CE(net(point), y).detach() for point in (last, best)]
    wrong = [net(point).argmax(1) != y for point in (last, best)]
    assert bool((wrong[1] >= wrong[0]).all())
    stays = wrong[0] == wrong[1]
    assert bool((losses[1][stays] >= losses[0][stays] - 1e-6).all())
    assert losses[1].sum() > losses[0].sum()


def test_more_restarts_never_raise_accuracy_and_sometimes_lower_it() -> None:
    net, x, y = digits_cnn()
    falls = [net(PGD(eps=0.15, steps=4, restarts=n)(net, x, y)).argmax(1) != y for n in (1, 6)]
    assert bool((falls[1] >= falls[0]).all())
    assert falls[1].sum() > falls[0].sum()


def test_kl_moves_the_answer_away_from_given_probabilities() -> None:
    net, (x, _) = small_net(), some_images()
    clean = net(x).softmax(1).detach()
    moved = PGD(eps=0.2, loss="kl", steps=20, norm=L2)(net, x, clean)
    uniform_start = UniformNoise(eps=0.2, norm=L2)(net, x, clean.argmax(1))
    assert bool((KL(net(moved), clean) > KL(net(uniform_start), clean)).all())


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_targeted_pgd_raises_its_target_which_is_never_the_label(target: str) -> None:
    net, (x, _) = small_net(), some_images(20)
    y = labels_of(net, x)
    moved = TargetedPGD(eps=1.0, steps=50, target=target)(net, x, y)
    assert accuracy(net, moved, y) == 0
    if target == "least_likely":
        least = net(x).argmin(1)
        assert bool((CE(net(moved), least) < CE(net(x), least)).all())


def test_random_targets_are_spread_over_all_other_classes() -> None:
    from vitruvius._random import Dice

    y = torch.full((3000,), 2)
    chosen = TARGETS["random"](torch.zeros(3000, 5), y, Dice(torch.arange(3000)))
    counts = chosen.bincount(minlength=5)
    assert counts[2] == 0
    assert int(counts[[0, 1, 3, 4]].min()) > 650


def test_parameter_gradients_and_flags_are_left_alone() -> None:
    net, (x, y) = small_net(), some_images()
    first: Tensor = next(net.parameters())
    first.requires_grad_(False)
    PGD(eps=0.1)(net, x, y)
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True]
    assert all(p.grad is None for p in net.parameters())


def test_attacks_work_where_the_caller_has_switched_gradients_off() -> None:
    net, (x, y) = small_net(), some_images()
    expected = PGD(eps=0.1)(net, x, y)
    with torch.no_grad():
        assert torch.equal(PGD(eps=0.1)(net, x, y), expected)
    with torch.inference_mode():
        assert torch.equal(PGD(eps=0.1)(net, x + 0, y), expected)
