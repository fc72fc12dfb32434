"""The three balls: random points in them, directions of unit norm, nearest points."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitruvius._errors import UnknownName
from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import project_l1_box
from vitruvius.attacks.base import LINF, Norm, as_norm
from vitruvius.attacks.norms import L1, L2, NORMS, L2Norm, in_order

each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=str)


@each_norm
def test_random_points_are_in_the_ball_and_reach_its_edge(norm: Norm) -> None:
    x = torch.zeros(2000, 1, 2, 2, dtype=torch.float64)
    lengths = norm.length(norm.random(x, 0.3, Dice(torch.arange(2000))))
    assert lengths.max() <= 0.3 + 1e-7
    assert lengths.max() > 0.29


@each_norm
def test_random_points_fill_the_ball_evenly(norm: Norm) -> None:
    """A ball of half the radius holds 1/16 of the volume in four dimensions, whatever the norm."""
    x = torch.zeros(20_000, 4)
    delta = norm.random(x, 1.0, Dice(torch.arange(20_000)))
    share = (norm.length(delta) < 0.5).double().mean()
    assert abs(share - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 20_000) ** 0.5
    assert delta.mean(0).abs().max() < 0.02


@each_norm
def test_directions_have_unit_norm_and_a_zero_gradient_has_none(norm: Norm) -> None:
    grad = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm.length(norm.steepest(grad)), torch.ones(5))
    assert not norm.steepest(torch.zeros(1, 3, 4, 4)).any()


@each_norm
def test_a_direction_climbs_faster_than_random_ones_of_the_same_length(norm: Norm) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(1, 50, generator=generator)
    others = torch.randn(500, 50, generator=generator)
    others = others / norm.length(others)[:, None]
    assert (norm.steepest(grad) @ grad.T).item() > (others @ grad.T).max()


@each_norm
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), eps=st.floats(0, 3))
def test_projection_is_the_nearest_point_of_the_ball(norm: Norm, seed: int, eps: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    projected = norm.project(delta, eps)
    assert norm.length(projected).max() <= eps + 1e-9
    inside = norm.length(delta) <= eps
    torch.testing.assert_close(projected[inside], delta[inside])
    noise = torch.randn(100, 4, 6, dtype=torch.float64, generator=generator)
    rivals = torch.stack([norm.project(delta + 0.3 * step, eps) for step in noise])
    assert bool(((projected - delta).norm(dim=-1) <= (rivals - delta).norm(dim=-1) + 1e-9).all())


def test_the_light_recipes_l2_arithmetic_is_torchs_renorm() -> None:
    delta = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm = L2Norm(floor=1e-10, slack=1e-7)
    torch.testing.assert_close(norm.project(delta, 2.5), delta.renorm(2, 0, 2.5), rtol=0, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), eps=st.floats(1e-3, 6), scale=st.floats(0.01, 5))
def test_the_l1_projection_within_the_image_solves_its_optimality_conditions(
    seed: int, eps: float, scale: float
) -> None:
    """sign(δ) · clip(|δ| − λ, 0, room), with one λ for all pixels, and λ > 0 only if the ball is full."""
    generator = torch.Generator().manual_seed(seed)
    x = (1.4 * torch.rand(3, 12, dtype=torch.float64, generator=generator) - 0.2).clamp(0, 1)
    delta = scale * torch.randn(3, 12, dtype=torch.float64, generator=generator)
    found = project_l1_box(x, delta, eps)
    assert float(L1.length(found).max()) <= eps + 1e-9
    assert float((x + found).min()) >= -1e-12
    assert float((x + found).max()) <= 1 + 1e-12
    room = torch.where(delta > 0, 1 - x, x)
    for row, want, limit in zip(found, delta, room, strict=True):
        low, high = 0.0, float(want.abs().max())
        for _ in range(100):  # bisection for λ, the slow oracle
            middle = (low + high) / 2
            total = torch.minimum((want.abs() - middle).clamp(min=0), limit).sum()
            low, high = (middle, high) if total > eps else (low, middle)
        free = torch.minimum(want.abs(), limit).sum() <= eps
        oracle = want.sign() * torch.minimum((want.abs() - (0.0 if free else high)).clamp(min=0), limit)
        torch.testing.assert_close(row, oracle, rtol=0, atol=1e-9)


def test_sparse_steps_leave_out_pixels_that_are_at_their_end() -> None:
    grad, point = torch.tensor([[5.0, 4.0, 1.0, -2.0]]), torch.tensor([[1.0, 0.5, 0.5, 0.0]])
    assert L1.usable(grad, point, 0.0, 1.0).tolist() == [[0.0, 4.0, 1.0, 0.0]]
    assert LINF.usable(grad, point, 0.0, 1.0) is grad


def test_norms_are_known_by_name_and_print_as_it() -> None:
    assert [as_norm(name) for name in ("linf", "L2", "l1")] == [LINF, L2, L1]
    assert repr(LINF) == "linf"
    with pytest.raises(UnknownName, match="did you mean 'linf'"):
        as_norm("lnf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_are_put_in_order_with_the_places_where_they_stood(dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (5, 400), generator=torch.Generator().manual_seed(0)).to(dtype) / 255  # many equal
    values = torch.cat([pixels, pixels.new_tensor([0.0, torch.inf, 1e-40]).expand(5, 3)], 1)
    ordered, places = in_order(values)
    assert torch.equal(ordered, values.sort(dim=1).values)
    assert torch.equal(values.gather(1, places), ordered)
    assert torch.equal(places.sort(dim=1).values, torch.arange(403).expand(5, -1))
    if dtype == torch.float32:
        assert torch.equal(places, values.sort(dim=1, stable=True).indices)
