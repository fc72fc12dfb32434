"""The benchmark of training steps: its processes take turns, keep to their time, and what they say becomes a table."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
GOOD = """
import sys
print("noise", flush=True)
print('#{"first_s": 3.0}', flush=True)
for line in sys.stdin:
    print('#{"seconds": 0.5, "images": 100}', flush=True)
"""
BROKEN = "import sys; sys.exit('no such device')"
SLOW = "import time; time.sleep(60)"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_of_training", FOLDER / "training.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("_contest")


@pytest.fixture
def contest(benchmark: ModuleType) -> ModuleType:
    return sys.modules["_contest"]


def contestant(contest: ModuleType, name: str, script: str, folder: Path, after: str = "") -> Any:
    command = [sys.executable, "-S", "-c", script]
    return contest.Contestant(name=name, command=command, log=folder / f"{name}.log", after=after)


def test_contestants_are_timed_in_turn_and_failures_keep_nobody_from_it(contest: ModuleType, tmp_path: Path) -> None:
    scripts = {"good": GOOD, "broken": BROKEN, "better": GOOD}
    everyone = [contestant(contest, name, script, tmp_path) for name, script in scripts.items()]
    events: list[dict[str, Any]] = []
    deadline = time.perf_counter() + 30
    try:
        contest.warm_up(everyone, events.append, together=4, limit=20.0, deadline=deadline)
        contest.take_turns(everyone, events.append, rounds=2, limit=10.0, deadline=deadline)
    finally:
        for one in everyone:
            one.end()
    failures = {event["name"]: event["reason"] for event in events if event["event"] == "failed"}
    assert failures == {"broken": "no such device"}
    turns = [event["name"] for event in events if event["event"] == "round"]
    assert turns == ["good", "better", "good", "better"]
    assert all(one.process.poll() is not None for one in everyone)


def test_one_that_is_not_ready_in_time_is_stopped(contest: ModuleType, tmp_path: Path) -> None:
    slow = contestant(contest, "slow", SLOW, tmp_path)
    events: list[dict[str, Any]] = []
    contest.warm_up([slow], events.append, together=1, limit=0.2, deadline=time.perf_counter() + 30)
    assert events == [{"event": "failed", "name": "slow", "reason": "not ready after 0.2 s"}]
    assert slow.process.poll() is not None


def test_one_that_waits_for_another_starts_after_it(contest: ModuleType, tmp_path: Path) -> None:
    again = contestant(contest, "again", GOOD, tmp_path, after="good")
    good = contestant(contest, "good", GOOD, tmp_path)
    events: list[dict[str, Any]] = []
    try:
        contest.warm_up([again, good], events.append, together=2, limit=10.0, deadline=time.perf_counter() + 30)
    finally:
        again.end()
        good.end()
    assert [event["name"] for event in events] == ["good", "again"]


def test_what_has_not_started_by_the_deadline_is_named(contest: ModuleType, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    late = [contestant(contest, "late", GOOD, tmp_path)]
    contest.warm_up(late, events.append, together=1, limit=10.0, deadline=time.perf_counter() - 1)
    assert events == [{"event": "failed", "name": "late", "reason": "no time was left to start it"}]


def test_rates_ratios_and_verdicts_come_from_the_medians(benchmark: ModuleType, contest: ModuleType) -> None:
    def timed(name: str, seconds: list[float]) -> Any:
        images = 60 * 512
        rounds = [{"seconds": value, "images": images} for value in seconds]
        made = contest.Contestant(name=name, command=(), log=Path("log"), rounds=rounds)
        made.ready = {"first_s": 21.0}
        return made

    everyone = [timed("p4.ours", [1.0, 9.0, 1.0]), timed("p4.graphs", [1.0]), timed("p4.bare", [2.0])]
    lost = contest.Contestant(name="p4.compiled", command=(), log=Path("log"), failure="no compiler")
    rows = benchmark.summarise([*everyone, lost], benchmark.PARTS)
    ours = rows[0]
    assert ours["images_per_s"] == pytest.approx(60 * 512)
    assert ours["cold_s"] == pytest.approx(20.0)
    assert (ours["of_bare"], ours["of_compiled"], ours["of_graphs"]) == (2.0, None, 1.0)
    (verdict,) = benchmark.verdicts({row["name"]: row for row in rows})
    assert verdict.startswith("holds   p4.ours / the fastest bare loop")
    benchmark.print_table(rows)


def test_parts_and_contestants_are_chosen_by_name(benchmark: ModuleType) -> None:
    assert benchmark.chosen(["p4.pgd"]) == [name for name in benchmark.NAMES if name.startswith("p4.pgd.")]
    assert benchmark.chosen(["deit.rpc4-compiled"]) == ["deit.rpc4-compiled"]
    assert set(benchmark.EXTRA).isdisjoint(benchmark.chosen([]))
    with pytest.raises(SystemExit, match="no part or contestant named 'p8'"):
        benchmark.chosen(["p8"])


@pytest.mark.parametrize("name", ["ours", "bare"])
def test_a_contestant_trains_and_says_how_long_it_took(
    benchmark: ModuleType,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = benchmark.Part(model="vitruvius/vit_digits", batch=4, steps=1, size=8, cifar=False)
    monkeypatch.setitem(benchmark.TINY, "deit", small)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(benchmark.os, "_exit", leave)
    options = argparse.Namespace(tiny=True, data=None, folder=tmp_path / "run")
    with contextlib.suppress(SystemExit):
        benchmark.compete(f"deit.{name}", options)
    said = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert set(said[0]) == {"first_s", "compiling"}
    assert said[1]["images"] == 4
    assert said[1]["seconds"] > 0
