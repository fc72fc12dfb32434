"""Random numbers: counted ones belong to images, global ones to batches and images."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch

from vitruvius._random import Dice, batch_seed, image_ids, image_keys, seed_batch, seed_of, seeded, uniform

MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """splitmix64 with Python's unbounded numbers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fold(key: int, value: int) -> int:
    return splitmix(key ^ splitmix(value & MASK))


def test_splitmix_gives_the_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in range(3)]
    assert [splitmix(state) for state in states] == published


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 7), (-3, 2), (2**64 - 1, 10**6)])
def test_keys_and_uniform_numbers_agree_with_unbounded_arithmetic(seed: int, epoch: int) -> None:
    start = fold(fold(0, seed), epoch) & (MASK >> 1)
    assert seed_of(seed, epoch) == start
    keys = image_keys(torch.tensor([5, 6]), torch.tensor([0, 2]), seed=seed, epoch=epoch)
    expected = [fold(fold(start, 5), 0), fold(fold(start, 6), 2)]
    assert [int(key) & MASK for key in keys] == expected
    numbers = uniform(keys, 3, 4)
    for row, key in zip(numbers, expected, strict=True):
        slow = [splitmix((fold(key, 3) + i * 0x9E3779B97F4A7C15) & MASK) >> 40 for i in range(4)]
        assert row.tolist() == [value / 2**24 for value in slow]


def test_numbers_of_keys_are_uniform_and_streams_unrelated() -> None:
    keys = image_keys(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), seed=0, epoch=0)
    a, b = uniform(keys, 1, 20).double(), uniform(keys, 2, 20).double()
    assert a.min() >= 0
    assert a.max() < 1
    assert abs(a.mean() - 0.5) < 0.005
    assert abs(a.var() - 1 / 12) < 0.001
    assert (a.flatten().histc(10, 0, 1) - 4000).abs().max() < 5 * 60  # five deviations of a binomial
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.025
    assert abs(torch.corrcoef(torch.stack([a[:-1].flatten(), a[1:].flatten()]))[0, 1]) < 0.025


def test_seeded_numbers_repeat_and_the_global_generators_stay_as_they_were() -> None:
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with seeded(-17):
        inside = draw()
    assert draw() == expected
    with seeded(-17):
        assert draw() == inside
    with seeded(17):
        assert all(a != b for a, b in zip(draw(), inside, strict=True))


def test_every_process_batch_and_epoch_has_its_own_numbers_and_repeats_them() -> None:
    def draw(**change: int) -> tuple[float, float, float]:
        where = {"seed": 3, "epoch": 1, "batch": 2, "rank": 0, **change}
        seed_batch(**where, device=torch.device("cpu"))  # type: ignore[arg-type]
        assert torch.initial_seed() == batch_seed(**where)
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    with seeded(0):
        assert draw() == draw()
        others = [draw(**change) for change in ({"seed": 4}, {"epoch": 2}, {"batch": 1}, {"rank": 1})]
        assert all(len(set(column)) == 5 for column in zip(draw(), *others, strict=True))


def test_numbers_of_an_image_do_not_depend_on_its_batch() -> None:
    ids = torch.tensor([7, 3, 11, 3_000_000_000])
    whole, rows = Dice(ids, seed=5, owner="a"), torch.tensor([2, 0])
    for draw in ("uniform", "normal", "signs"):
        assert torch.equal(getattr(whole, draw)("s", (3, 2))[rows], getattr(whole[rows], draw)("s", (3, 2)))
    assert torch.equal(whole.integers("s", 9, (4,))[rows], whole[rows].integers("s", 9, (4,)))


@pytest.mark.parametrize("shape", [(), (2, 3), (150, 150)], ids=str)  # the last is made in several blocks
def test_numbers_of_an_image_agree_with_unbounded_arithmetic(shape: tuple[int, ...]) -> None:
    ids, steps = torch.tensor([7, -11, 2**62]), torch.tensor([0, 3, 2**40])
    dice = Dice(ids, seed=-3, owner="a")
    numbers, signs = (draw("s", shape, steps).reshape(3, -1) for draw in (dice.uniform, dice.signs))
    drawn = dice.integers("s", 2**31, shape, steps).reshape(3, -1)
    for row, (key, step) in enumerate(zip(ids.tolist(), steps.tolist(), strict=True)):
        for more in (-2 * 0x9E3779B97F4A7C15, zlib.crc32(b"a/s") * 0x9E3779B97F4A7C15, step):
            key = splitmix((key + more - 0x9E3779B97F4A7C15) & MASK)
        for place in {0, numbers.shape[1] // 2, numbers.shape[1] - 1}:
            bits = splitmix((key + place * 0x9E3779B97F4A7C15) & MASK)
            assert float(numbers[row, place]) == (bits >> 40) / 2**24
            assert int(drawn[row, place]) == bits >> 33
            assert float(signs[row, place]) == 1 - 2 * (bits >> 63)


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
    x = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ids = image_ids(x)
    assert torch.equal(image_ids(x.flip(0)).flip(0), ids)
    assert len(ids.unique()) == 40
    moved = x.clone()
    moved[0, 0, 0, 0] += 1e-6
    assert image_ids(moved)[0] != ids[0]
    assert torch.equal(image_ids(x.double()), ids)
    assert torch.equal(image_ids(x.to(memory_format=torch.channels_last)), ids)
    moved[1] = 0
    assert torch.equal(image_ids(-moved)[1], image_ids(moved)[1])  # −0 is 0
