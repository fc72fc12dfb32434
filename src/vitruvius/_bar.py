"""How far long work is: a live bar in a terminal, a plain line every half minute elsewhere (a log is never empty)."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between two plain lines


class Bar:
    """Told how far some work is, and a few words about it.

    title: what is being done. shown: whether this process says anything. console: where; default standard error.
    """

    def __init__(self, title: str, *, shown: bool = True, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self.shown = shown
        self.live = shown and self.console.is_terminal
        self.bars = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.bar = self.bars.add_task("", total=None, words="")
        self._log = _PlainLog(self)

    def __enter__(self) -> Bar:
        self.bars.start()
        if self.shown and not self.live:
            self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.stop()
        self.bars.stop()

    def __call__(self, done: int, total: int | None, /, words: str = "") -> None:
        self.bars.update(self.bar, completed=done, total=total, words=words)
        self._log.note(done, total, words)

    def line(self, text: str) -> None:
        """One line that stays, above the live bar or in the log."""
        if self.shown:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class _PlainLog:
    """A line every half minute about where the work is, also while one step takes longer than that."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.done = 0
        self.total: int | None = None
        self.words = ""
        self._first: tuple[float, int] | None = None  # when counting began, and at how many
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def note(self, done: int, total: int | None, words: str) -> None:
        if self._first is None or done < self.done:  # a new round begins
            self._first = (time.monotonic(), done)
        self.done = done
        self.total = total
        self.words = words

    def sentence(self) -> str:
        """`evaluating: 128/360, pgd 43.0 %, 2.1 per second, 1 min 50 s left`."""
        known = "?"
        if self.total is not None:
            known = str(self.total)
        parts = [f"{self.bar.title}: {self.done}/{known}"]
        if self.words:
            parts.append(self.words)
        return ", ".join([*parts, *self._speed()])

    def _speed(self) -> list[str]:
        if self._first is None:
            return []
        begun, before = self._first
        rate = (self.done - before) / max(time.monotonic() - begun, 1e-9)
        if rate <= 0:
            return []
        said = [f"{rate:.2g} per second"]
        if self.total is not None:
            minutes, seconds = divmod(round((self.total - self.done) / rate), 60)
            said.append(f"{minutes} min {seconds} s left")
        return said

    def _write(self) -> None:
        while not self._stopped.wait(EVERY):
            self.bar.line(self.sentence())
