"""Random numbers by counting."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vitruvius.data._image_seeds import _splitmix, image_keys, seed_of, seeded, uniform

MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """splitmix64 with Python's unbounded numbers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fold(key: int, value: int) -> int:
    return splitmix(key ^ splitmix(value & MASK))


def test_splitmix_gives_the_published_numbers():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in range(3)]
    assert [splitmix(state) for state in states] == published
    signed = torch.tensor([state - (1 << 64) if state >> 63 else state for state in states])
    assert [int(z) & MASK for z in _splitmix(signed)] == published


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 7), (-3, 2), (2**64 - 1, 10**6)])
def test_keys_and_uniform_numbers_agree_with_unbounded_arithmetic(seed, epoch):
    start = fold(fold(0, seed), epoch) & (MASK >> 1)
    assert seed_of(seed, epoch) == start
    keys = image_keys(torch.tensor([5, 6]), torch.tensor([0, 2]), seed=seed, epoch=epoch)
    expected = [fold(fold(start, 5), 0), fold(fold(start, 6), 2)]
    assert [int(key) & MASK for key in keys] == expected
    numbers = uniform(keys, 3, 4)
    for row, key in zip(numbers, expected, strict=True):
        slow = [splitmix((fold(key, 3) + i * 0x9E3779B97F4A7C15) & MASK) >> 40 for i in range(4)]
        assert row.tolist() == [value / 2**24 for value in slow]


def test_uniform_numbers_are_uniform_and_streams_unrelated():
    keys = image_keys(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), seed=0, epoch=0)
    a, b = uniform(keys, 1, 20).double(), uniform(keys, 2, 20).double()
    assert a.min() >= 0
    assert a.max() < 1
    assert abs(a.mean() - 0.5) < 0.005
    assert abs(a.var() - 1 / 12) < 0.001
    assert (a.flatten().histc(10, 0, 1) - 4000).abs().max() < 5 * 60  # five deviations of a binomial
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.025
    assert abs(torch.corrcoef(torch.stack([a[:-1].flatten(), a[1:].flatten()]))[0, 1]) < 0.025


def test_seeded_numbers_repeat_and_the_global_generators_stay_as_they_were():
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
