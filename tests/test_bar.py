"""A live bar in a terminal, plain lines elsewhere."""

import io
import time

import pytest
from rich.console import Console

from vitruvius import _bar
from vitruvius._bar import Bar


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


def test_a_line_stays_wherever_it_is_written() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=40)
        with Bar("evaluating", console=console) as bar:
            bar.line("clean 93.06 % (335 of 360 images), a line longer than the terminal")
        assert "clean 93.06 % (335 of 360 images), a line longer than the terminal" in console.file.getvalue()
