"""FAB: projections onto hyperplanes, the released iterates, and distances that are those of the ball."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attacked import GoldenNet, accuracy, digits_cnn, golden, labels_of, linear_problem, small_net, some_images

from vitruvius.attacks.base import LINF, MARGIN, Norm
from vitruvius.attacks.fab import FAB, BoundaryRules, dual_length, project_to_plane
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.norms import L2, NORMS


@pytest.mark.parametrize("norm", NORMS.values(), ids=str)
def test_the_shortest_way_to_a_hyperplane_is_the_golden_one(norm: Norm) -> None:
    tensors, _, _ = golden("aa_projections")
    delta = project_to_plane(norm, tensors["x"], tensors["w"], tensors["b"])
    torch.testing.assert_close(delta, tensors[str(norm)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS.values(), ids=str)
def test_weights_of_zero_and_points_on_the_plane_are_no_trouble(norm: Norm) -> None:
    x = torch.tensor([[0.5, 0.2, 0.9], [0.5, 0.2, 0.9]])
    w = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    delta = project_to_plane(norm, x, w, torch.tensor([0.5, 0.75]))
    torch.testing.assert_close(delta[:, 0], torch.tensor([0.0, 0.25]))
    assert bool(delta.isfinite().all())


@pytest.mark.parametrize("case", golden("aa_fab_trace")[1], ids=lambda case: case["id"])
def test_iterates_and_nearest_points_are_the_originals(case: dict[str, Any]) -> None:
    tensors, _, metadata = golden("aa_fab_trace")
    net, norm = GoldenNet(tensors), {"Linf": LINF, "L2": L2}[case["norm"]]
    right = labels_of(net, tensors["x"]) == tensors["y"]
    x, y = tensors["x"][right], tensors["y"][right]
    target = net(x).argsort(1)[:, -case["target_rank"]] if case["targeted"] else y
    attack = (FABTargeted if case["targeted"] else FAB)(eps=case["eps"], norm=norm)
    rules = BoundaryRules(norm, case["eps"], case["n_iter"], attack.linearise)
    state, points = rules.begin(x, y, target, x), []
    for _ in range(case["n_iter"]):
        points.append(state.point)
        state = rules.advance(net, state)
    name = case["id"]
    kept = torch.stack(points)[:: int(metadata["stride"])]
    torch.testing.assert_close(kept, tensors[f"{name}.iterates"], rtol=0, atol=1e-12)
    torch.testing.assert_close(state.nearest, tensors[f"{name}.adv"][right], rtol=0, atol=1e-12)
    torch.testing.assert_close(state.distance, tensors[f"{name}.dist"][right], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS.values(), ids=str)
def test_the_dual_norm_is_the_steepest_slope(norm: Norm) -> None:
    """⟨g, d⟩ ≤ dual(g) · ‖d‖ for all d, with equality for some: tried on random and on extreme d."""
    grad = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    extreme = {"linf": grad.sign(), "l2": grad, "l1": (grad.abs() == grad.abs().max()) * grad.sign()}[str(norm)]
    dual = dual_length(norm, grad)
    torch.testing.assert_close((grad * extreme).sum(1) / norm.length(extreme), dual)
    others = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    assert float(((others @ grad.T).squeeze(1) / norm.length(others)).max()) <= float(dual)


def test_fab_t_falls_as_many_images_as_the_original_alone() -> None:
    net, x, y = digits_cnn()
    x, y = x[:30], y[:30]
    ours = net(FABTargeted(eps=0.15, steps=40)(net, x, y)).argmax(1) == y
    flags, _, _ = golden("aa_runs_cnn")
    original = flags["Linf_0.15_seed0.final_robust"][:30]
    assert int(ours.sum()) <= int(original.sum()) + 1


def test_images_that_are_wrong_already_come_back_untouched() -> None:
    net, (x, _) = small_net(), some_images()
    y = (labels_of(net, x) + 1) % 5
    assert torch.equal(FABTargeted(eps=0.1)(net, x, y), x)


def test_untargeted_fab_and_random_restarts_find_points_within_the_ball() -> None:
    net, (x, _) = small_net(), some_images(8)
    y = labels_of(net, x)
    once, thrice = (FAB(eps=0.1, steps=10, restarts=n)(net, x, y) for n in (1, 3))
    assert accuracy(net, thrice, y) <= accuracy(net, once, y) < 1
    assert float((thrice - x).abs().max()) <= 0.1 + 1e-6


@pytest.mark.parametrize("norm", NORMS.values(), ids=str)
@pytest.mark.parametrize("kind", [FAB, FABTargeted])
def test_without_a_radius_fab_finds_the_exact_distance_to_a_linear_boundary(kind: type[FAB], norm: Norm) -> None:
    net, x, y, w = linear_problem()
    with torch.no_grad():
        moved = kind(eps=math.inf, norm=norm, steps=20)(net, x, y)
        exact = MARGIN(net(x), y).abs() / dual_length(norm, w)
    assert accuracy(net, moved, y) == 0
    reachable = exact < 0.3  # in L1 one pixel would have to leave the image
    distance = norm.length(moved - x)
    torch.testing.assert_close(distance[reachable], exact[reachable], rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("kind", [FAB, FABTargeted])
def test_without_a_radius_fab_goes_on_after_the_first_point_that_fools_the_model(kind: type[FAB]) -> None:
    net, x, y = digits_cnn()
    x, y = x[:12], y[:12]
    nearest, first = (kind(eps=eps, norm="l2", steps=25, restarts=2)(net, x, y) for eps in (math.inf, 10.0))
    assert accuracy(net, nearest, y) <= accuracy(net, first, y)
    assert bool(nearest.isfinite().all())
    lengths = [float(L2.length(moved - x).mean()) for moved in (nearest, first)]
    assert lengths[0] < 0.9 * lengths[1]
    few, many = (L2.length(kind(eps=math.inf, norm="l2", steps=n)(net, x, y) - x) for n in (5, 25))
    assert bool((many <= few + 1e-6).all())


def test_a_search_without_radius_does_not_depend_on_how_images_are_batched() -> None:
    net, x, y = digits_cnn()
    x, y, ids = x[:9], y[:9], torch.arange(9)
    whole, parts = (FABTargeted(eps=math.inf, steps=8, targets=3, batch_size=n)(net, x, y, ids=ids) for n in (50, 4))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)
    first = FABTargeted(eps=math.inf, steps=8, targets=1)(net, x, y, ids=ids)
    nearer, farther = (LINF.length(moved - x) for moved in (whole, first))  # the nearest of all targets counts
    assert bool((nearer <= farther + 1e-6).all())
    assert bool((nearer < farther - 1e-4).any())


def test_restarts_begin_at_half_the_smaller_of_radius_and_distance() -> None:
    attack, x, distance = FAB(eps=0.2), torch.full((2, 3, 4, 4), 0.5), torch.tensor([0.1, math.inf])
    start = attack._random_start(x, attack.dice(torch.arange(2)), 1, distance)
    torch.testing.assert_close(LINF.length(start - x), torch.tensor([0.05, 0.1]))
