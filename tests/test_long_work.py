"""Progress: a live bar in a terminal, plain lines elsewhere, and messages of the package beside it."""

import io
import logging
import time

import pytest
from rich.console import Console

from vitruvius import _progress
from vitruvius._progress import Bar, messages_shown

logger = logging.getLogger("vitruvius.somewhere")


def drawn(*, terminal: bool, shown: bool = True, seconds: float = 0.0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Bar("averaging", shown=shown, console=console) as bar:
        bar(1, 8, "first")
        bar(3, 8, "half-way")
        bar._display.refresh()
        time.sleep(seconds)
    return console.file.getvalue()


def test_a_terminal_sees_title_numbers_text_and_the_time_left() -> None:
    text = drawn(terminal=True)
    assert all(word in text for word in ("averaging", "3/8", "half-way", "left"))


def test_short_work_elsewhere_and_other_processes_are_silent() -> None:
    assert "averaging" not in drawn(terminal=False)
    assert "averaging" not in drawn(terminal=True, shown=False)


def test_long_work_without_a_terminal_writes_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "EVERY", 0.02)
    lines = drawn(terminal=False, seconds=0.15).splitlines()
    assert len(lines) >= 2  # though nobody told how far the work was meanwhile
    assert lines[-1].startswith("averaging: 3/8, half-way, ")
    assert lines[0].endswith(" left")
    assert "averaging" not in drawn(terminal=False, shown=False, seconds=0.1)


def test_a_rate_is_that_of_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("vitruvius._progress.time.monotonic", lambda: now)
    bar = Bar("working", shown=False, at_most=True)
    assert bar.speed() == ""
    for now in range(500):
        bar(10.0 * now, None)
    assert bar.speed() == "10 per second"
    for now in range(500, 700):
        bar(5000 + 2.0 * (now - 500), 5498)
    assert bar.speed() == "2 per second, at most 50 s left"
    bar(5398, float("inf"))
    assert bar.speed() == "2 per second"
    bar(0, 10)
    assert bar.speed() == "", "a new round"


def test_messages_are_printed_once_while_a_bar_or_a_command_is_open() -> None:
    outer, inner = (Console(file=io.StringIO(), width=40) for _ in range(2))
    logger.info("before")
    with messages_shown(outer), Bar("working", console=inner):
        logger.info("clean [b]93 %[/b] of a rather long line that is not folded")
        logger.debug("a detail")
    logger.info("after")
    assert outer.file.getvalue() == "clean [b]93 %[/b] of a rather long line that is not folded\n"
    assert inner.file.getvalue() == ""
    assert not logging.getLogger("vitruvius").handlers
