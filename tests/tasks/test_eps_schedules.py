"""eps schedules: the light recipe's tables, and none of its jumps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hardened import golden, small

from vitruvius._errors import ConfigError
from vitruvius.tasks.adversarial import Adversarial
from vitruvius.tasks.inner import make_schedule

CASES = golden("light_eps_schedules")[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_tables_are_the_light_recipes(case: dict[str, Any]) -> None:
    table = golden("light_eps_schedules")[0][case["id"]]
    spec = {"use": case["schedule"]}
    if case["schedule"] != "constant":  # theirs ignores the zero epochs of a constant eps, ours has none to ignore
        spec |= {"epochs": case["period"], "zero": case["zero_epochs"], "variant": "released"}
    schedule = make_schedule(spec)
    shares = [schedule.share(epoch=e, update=7 * e, updates_per_epoch=7) for e in range(len(table))]
    torch.testing.assert_close(case["final"] * torch.tensor(shares, dtype=torch.float64), table, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use", ["linear", "sine"])
def test_zero_epochs_do_not_make_the_ramp_jump(use: str) -> None:
    ours, theirs = (
        make_schedule({"use": use, "epochs": 10, "zero": 5, "per": "update", "variant": variant})
        for variant in ("paper", "released")
    )
    steps = [n / 100 for n in range(400, 1100)]

    def largest_jump(schedule: Any) -> float:
        return max(schedule.after(b) - schedule.after(a) for a, b in itertools.pairwise(steps))

    assert largest_jump(ours) < 0.01
    assert largest_jump(theirs) > 0.4
    assert (ours.after(4.99), ours.after(5.0), ours.after(7.5), ours.after(10.0)) == (0.0, 0.0, pytest.approx(0.5), 1.0)


def test_zero_epochs_count_for_a_constant_eps_too() -> None:
    schedule = make_schedule({"use": "constant", "zero": 2})
    assert [schedule.after(e) for e in range(4)] == [0.0, 0.0, 1.0, 1.0]


def test_per_update_climbs_within_an_epoch_whether_updates_count_from_the_run_or_the_epoch() -> None:
    stairs, slope = (make_schedule({"use": "linear", "epochs": 4, "per": per}) for per in ("epoch", "update"))
    for epoch in range(4):
        for update in range(5):
            smooth = slope.share(epoch=epoch, update=update, updates_per_epoch=5)
            assert smooth == pytest.approx((epoch + update / 5) / 4)
            assert smooth == slope.share(epoch=epoch, update=5 * epoch + update, updates_per_epoch=5)
            assert stairs.share(epoch=epoch, update=update, updates_per_epoch=5) == epoch / 4


def test_sine_is_half_a_wave() -> None:
    schedule = make_schedule({"use": "sine", "epochs": 8})
    for e in range(8):
        assert schedule.after(e) == pytest.approx(0.5 - 0.5 * math.cos(math.pi * e / 8))


def test_a_ramp_that_ends_before_it_begins_and_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="ends its ramp at epoch 3, before it begins at epoch 7"):
        make_schedule({"use": "linear", "epochs": 3, "zero": 7})
    with pytest.raises(ConfigError, match=r"task.schedule: unknown key 'linear.period'"):
        make_schedule({"use": "linear", "epochs": 3, "period": 7})
    with pytest.raises(ConfigError, match=r"linear.epochs is missing"):
        make_schedule("linear")


@pytest.mark.parametrize("coupled", [True, False])
def test_the_step_follows_eps_only_when_coupled(coupled: bool) -> None:
    task = Adversarial(
        small(), eps=0.1, attack={"use": "pgd", "steps": 3}, coupled=coupled, schedule={"use": "linear", "epochs": 10}
    )
    task.at(epoch=4, update=0, updates_per_epoch=5)
    attack: Any = task.inner.attack
    assert attack.eps == pytest.approx(0.04)
    reached = 1.5 * attack.eps / attack.steps if attack.step_size is None else attack.step_size
    assert reached == pytest.approx(1.5 * (0.04 if coupled else 0.1) / 3)
    given = Adversarial(
        small(),
        eps=0.1,
        attack={"use": "pgd", "step_size": 0.03},
        coupled=coupled,
        schedule={"use": "linear", "epochs": 10},
    )
    given.at(epoch=4, update=0, updates_per_epoch=5)
    assert given.inner.attack.step_size == pytest.approx(0.012 if coupled else 0.03)
