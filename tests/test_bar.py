"""A live bar in a terminal, plain lines elsewhere."""

import io
import time

import pytest
from rich.console import Console

from vitruvius import _bar
from vitruvius._bar import Bar, Pace
from vitruvius._format import format_duration


def drawn(*, terminal: bool, shown: bool = True, seconds: float = 0.0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Bar("averaging", shown=shown, console=console) as bar:
        bar(1, 8, "begun")
        bar(3, 8, "half-way")
        bar.bars.refresh()
        time.sleep(seconds)
    return console.file.getvalue()


def test_a_terminal_sees_title_numbers_words_and_the_time_left() -> None:
    text = drawn(terminal=True)
    assert all(word in text for word in ("averaging", "3/8", "half-way", "left"))


def test_short_work_elsewhere_and_other_processes_are_silent() -> None:
    assert "averaging" not in drawn(terminal=False)
    assert "averaging" not in drawn(terminal=True, shown=False)


def test_long_work_without_a_terminal_writes_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bar, "EVERY", 0.02)
    lines = drawn(terminal=False, seconds=0.15).splitlines()
    assert len(lines) >= 2  # though nobody told how far the work was meanwhile
    assert lines[0].startswith("averaging: 3/8, half-way, ")
    assert lines[0].endswith(" left")
    assert "averaging" not in drawn(terminal=False, shown=False, seconds=0.1)


def test_a_pace_that_is_told_takes_the_place_of_the_images() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar("evaluating", console=console) as bar:
        bar(0, 40, "autoattack: apgd-t (2 of 4)")
        bar(5, 40, "autoattack: apgd-t (2 of 4)")
        bar.pace("38 steps/s, at most 2 min 10 s left")
        bar.bars.refresh()
        assert bar.sentence() == ("evaluating: 5/40, autoattack: apgd-t (2 of 4), 38 steps/s, at most 2 min 10 s left")
        bar.pace("")
        assert " per second, " in bar.sentence()
    assert "38 steps/s, at most 2 min 10 s left" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_rate_is_that_of_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("vitruvius._bar.time.monotonic", lambda: now)
    pace = Pace()
    assert pace.time_left(10) == []
    for now in range(500):
        pace.note(10.0 * now)
    assert pace.rate == 10
    for now in range(500, 700):
        pace.note(5000 + 2.0 * (now - 500))
    assert pace.rate == pytest.approx(2)
    assert pace.time_left(100, at_most=True) == ["at most 50 s left"]
    assert pace.time_left(None) == pace.time_left(float("inf")) == []
    pace.note(0)
    assert pace.rate == 0, "a new round"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.4, "59 s"), (130, "2 min 10 s"), (3600, "1 h 0 min"), (5000, "1 h 23 min")]
)
def test_durations_are_said_in_two_units_at_most(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_line_stays_wherever_it_is_written() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=40)
        with Bar("evaluating", console=console) as bar:
            bar.line("clean 93.06 % (335 of 360 images), a line longer than the terminal")
        assert "clean 93.06 % (335 of 360 images), a line longer than the terminal" in console.file.getvalue()
