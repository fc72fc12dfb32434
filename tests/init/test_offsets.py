"""Impulses on a grid: taps, targets, measures."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch
from beginnings import seeded

from golden_files import read_golden
from vitruvius._errors import ConfigError
from vitruvius.init.impulse import draw_offsets, impulse_map, offset_of, quality

TARGETS, TARGETS_META = read_golden("impulse_targets")


@pytest.mark.parametrize("case", TARGETS_META["cases"], ids=lambda case: case["id"])
def test_targets_are_those_of_the_released_code(case):
    grid, kernel = tuple(case["grid"]), case["kernel"]
    offsets = [offset_of(int(k), kernel) for k in TARGETS[f"{case['id']}.k"]]
    assert offsets == [tuple(o) for o in TARGETS[f"{case['id']}.offsets"].tolist()]
    for offset, target in zip(offsets, TARGETS[f"{case['id']}.target"], strict=True):
        assert torch.equal(impulse_map(grid, offset), target.double())


def test_a_target_is_a_convolution_with_one_tap():
    image = torch.randn(1, 1, 5, 7, dtype=torch.float64)
    for tap in range(9):
        filter = torch.zeros(9, dtype=torch.float64)
        filter[tap] = 1.0
        expected = torch.nn.functional.conv2d(image, filter.view(1, 1, 3, 3), padding=1).flatten()
        torch.testing.assert_close(impulse_map((5, 7), offset_of(tap, 3)) @ image.flatten(), expected)


def test_distinct_taps_come_back_only_when_all_were_used():
    drawn = list(islice(draw_offsets(3, "distinct", seeded(3)), 27))
    assert set(Counter(drawn).values()) == {3}
    assert sorted(drawn[:9]) == sorted(drawn[9:18]) == list(range(9))
    assert drawn[:9] != drawn[9:18]


def test_random_taps_repeat_and_follow_the_generator():
    drawn = list(islice(draw_offsets(3, "random", seeded(4)), 9))
    assert drawn == list(islice(draw_offsets(3, "random", seeded(4)), 9))
    assert len(set(drawn)) < 9


def test_cycling_taps_begin_in_the_middle_and_go_outwards():
    assert list(islice(draw_offsets(3, "cycle", seeded()), 11)) == [4, 1, 3, 5, 7, 0, 2, 6, 8, 4, 1]


def test_an_unknown_order_is_an_error():
    with pytest.raises(ConfigError, match="'distinct', 'random' or 'cycle'"):
        next(draw_offsets(3, "sorted", seeded()))  # type: ignore[arg-type]


def test_the_target_itself_is_perfect_and_uniform_attention_is_not():
    target = impulse_map((4, 5), (1, -1))
    assert quality(target, (4, 5), (1, -1)) == (1.0, 1.0, 0.0)
    uniform = quality(torch.full((20, 20), 1 / 20), (4, 5), (1, -1))
    rows = 3 * 4
    assert uniform.probability == pytest.approx(1 / 20)
    assert uniform.mse == pytest.approx((rows * ((19 / 20) ** 2 + 19 / 400) + (20 - rows) * 20 / 400) / 400)
