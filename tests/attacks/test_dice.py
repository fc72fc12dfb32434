"""Random numbers belong to images, not to batches."""

from __future__ import annotations

import pytest
import torch
from attacked import some_images

from vitruvius._dice import Dice, image_ids


def test_numbers_of_an_image_do_not_depend_on_its_batch() -> None:
    ids = torch.tensor([7, 3, 11, 3_000_000_000])
    whole, rows = Dice(ids, seed=5, owner="a"), torch.tensor([2, 0])
    for draw in ("uniform", "normal", "signs"):
        assert torch.equal(getattr(whole, draw)("s", (3, 2))[rows], getattr(whole[rows], draw)("s", (3, 2)))
    assert torch.equal(whole.integers("s", 9, (4,))[rows], whole[rows].integers("s", 9, (4,)))


def test_every_image_may_stand_at_another_step() -> None:
    dice = Dice(torch.arange(3))
    steps = torch.tensor([4, 0, 9])
    apart = torch.stack([dice[torch.tensor([i])].uniform("s", (5,), int(step))[0] for i, step in enumerate(steps)])
    assert torch.equal(dice.uniform("s", (5,), steps), apart)


@pytest.mark.parametrize("change", [{"seed": 1}, {"owner": "b"}, {"stream": "t"}, {"step": 1}, {"id": 1}], ids=str)
def test_changing_anything_changes_the_numbers(change: dict[str, object]) -> None:
    def draw(seed: int = 0, owner: str = "a", stream: str = "s", step: int = 0, id: int = 0) -> torch.Tensor:
        return Dice(torch.tensor([id]), seed, owner).uniform(stream, (1000,), step)[0]

    other = draw(**change)  # type: ignore[arg-type]
    assert (draw() == other).float().mean() < 0.01
    assert abs(torch.corrcoef(torch.stack([draw(), other]))[0, 1]) < 0.12


def test_uniform_numbers_are_even_in_every_tenth_and_uncorrelated() -> None:
    numbers = Dice(torch.arange(4000), 1).uniform("s", (25,))
    counts = (numbers * 10).long().flatten().bincount(minlength=10).double()
    chi_square = ((counts - 10_000) ** 2 / 10_000).sum()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert chi_square < 27.9  # 99.9 % of chi-square with 9 degrees of freedom
    off_diagonal = torch.corrcoef(numbers.T) - torch.eye(25)
    assert off_diagonal.abs().max() < 5 / 4000**0.5


def test_normal_numbers_have_the_moments_of_a_normal() -> None:
    numbers = Dice(torch.arange(1000), 2).normal("s", (100,)).double()
    assert abs(numbers.mean()) < 0.015
    assert abs(numbers.var() - 1) < 0.02
    assert abs((numbers**4).mean() - 3) < 0.1


def test_integers_and_signs_fill_their_range() -> None:
    dice = Dice(torch.arange(3000))
    assert dice.integers("s", 7).unique().tolist() == list(range(7))
    high = torch.arange(1, 3001)
    assert bool((dice.integers("s", high) < high).all())
    assert dice.signs("s", (2,)).unique().tolist() == [-1, 1]
    assert abs(dice.signs("s", (30,)).mean()) < 0.02


def test_equal_images_have_equal_ids_wherever_they_are() -> None:
    x, _ = some_images(40)
    ids = image_ids(x)
    assert torch.equal(image_ids(x.flip(0)).flip(0), ids)
    assert len(ids.unique()) == 40
    moved = x.clone()
    moved[0, 0, 0, 0] += 1e-6
    assert image_ids(moved)[0] != ids[0]
    assert torch.equal(image_ids(x.double()), ids)
