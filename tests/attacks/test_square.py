"""Square: the released search under the released draws, bumps of unit norm, schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attacked import GoldenNet, accuracy, digits_cnn, golden

from vitruvius._errors import ConfigError
from vitruvius.attacks import L1, L2, Dice, Norm
from vitruvius.attacks._search.square_proposals import paint, share, square_sides
from vitruvius.attacks._search.square_proposals_l2 import bump, bump_proposals
from vitruvius.attacks.noise import UniformNoise
from vitruvius.attacks.square import Square, SquareState


def test_squares_shrink_on_the_released_schedule() -> None:
    tensors, _, _ = golden("aa_square_trace")
    queries = tensors["p_iters"].tolist()
    assert [share(i, 0.8) for i in queries] == tensors["p_values"].tolist()
    assert [share(i, 0.8, 1000) for i in queries] == tensors["p_values_rescaled_1000"].tolist()


@pytest.mark.parametrize("case", golden("aa_square_trace")[1], ids=lambda case: case["id"])
def test_with_the_released_draws_the_search_is_the_released_one(case: dict[str, Any]) -> None:
    tensors, _, _ = golden("aa_square_trace")
    name, net = case["id"], GoldenNet(tensors)
    rows = tensors[f"{name}.sample_index"]
    x, y, count = tensors["x"][rows], tensors["y"][rows], len(rows)
    attack = Square(eps=case["eps"], queries=case["n_queries"] + 2)
    squares, zero = attack.proposals(x), torch.zeros(count, dtype=torch.long)
    start = paint(x, case["eps"], tensors[f"{name}.init_signs"])
    state = SquareState(x, y, zero, start, x, x.new_full((count,), -math.inf), zero, zero.bool())

    def judge(state: SquareState) -> SquareState:
        """Images that are broken stay as they are."""
        new = attack.judge(net, state)
        pairs = zip(state, new, strict=True)
        return SquareState(*(torch.where(state.done.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))

    state = judge(state)
    for query, (place, signs) in enumerate(zip(tensors[f"{name}.pos"], tensors[f"{name}.signs"], strict=True)):
        row, column = (p.expand(count) for p in place)
        side = squares.sides[query].expand(count)
        state = judge(state._replace(point=squares.place(x, state.best, row, column, side, signs.view(1, -1, 1, 1))))
    torch.testing.assert_close(state.best, tensors[f"{name}.x_best"], rtol=0, atol=1e-12)
    assert state.query.tolist() == tensors[f"{name}.n_queries"].tolist()
    assert torch.equal(net(state.best).argmax(1), tensors[f"{name}.pred"])


@pytest.mark.parametrize("norm", [L2, L1], ids=str)
@pytest.mark.parametrize("side", [1, 3, 7])
def test_bumps_have_unit_norm_and_two_signs(norm: Norm, side: int) -> None:
    shape = bump(side, norm, torch.device("cpu"))
    torch.testing.assert_close(norm.length(shape[None]), torch.ones(1))
    if side > 1:
        assert bool((shape[: side // 2] >= 0).all())
        assert bool((shape[side // 2 :] <= 0).all())
        assert shape.min() < 0 < shape.max()


@pytest.mark.parametrize("norm", [L2, L1], ids=str)
@pytest.mark.parametrize("size", [(6, 6), (12, 12), (9, 14)])
def test_bumps_fit_images_of_any_size_and_use_the_whole_radius(norm: Norm, size: tuple[int, int]) -> None:
    x, dice = torch.full((3, 3, *size), 0.5), Dice(torch.arange(3))
    sides = square_sides(50, 0.8, size, False, x.device)
    bumps = bump_proposals(norm, 0.7, (sides | 1).clamp(min=3, max=min(size) - 1 | 1))
    point = bumps.start(x, dice)
    for query in range(5):
        torch.testing.assert_close(norm.length(point - x), torch.full((3,), 0.7), rtol=1e-4, atol=0)
        point = bumps.plan(x, dice, torch.full((3,), query * 10), 2)(point, 0)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.2), ("l2", 1.5), ("l1", 7.0)])
def test_square_search_beats_noise_of_the_same_size(norm: str, eps: float) -> None:
    net, x, y = digits_cnn()
    searched = accuracy(net, Square(eps=eps, norm=norm, queries=80)(net, x, y), y)
    assert searched < accuracy(net, UniformNoise(eps=eps, norm=norm)(net, x, y), y) - 0.1


def test_images_keep_their_squares_in_every_batch() -> None:
    net, x, y = digits_cnn()
    x, y, ids = x[:12], y[:12], torch.arange(12)
    whole = Square(eps=0.15, queries=40)(net, x, y, ids=ids)
    streamed = Square(eps=0.15, queries=40, batch_size=5)(net, x, y, ids=ids)
    torch.testing.assert_close(whole, streamed)


def test_square_wants_images_and_queries() -> None:
    with pytest.raises(ConfigError, match="queries=0"):
        Square(eps=0.1, queries=0)
    with pytest.raises(ConfigError, match=r"needs images \(B, C, H, W\)"):
        Square(eps=0.1)(torch.nn.Linear(4, 3), torch.rand(2, 4), torch.zeros(2, dtype=torch.long))
