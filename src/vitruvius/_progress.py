"""How far long work is: `progress(done, total, text)`, and the bar that shows it.

Long work is given a `Progress` and tells nobody else how far it is; sentences that should stay go to the log of the
module (`logger.info`). `Bar` shows both: live in a terminal, elsewhere as a plain line every half minute.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitruvius._format import format_duration, format_rate

EVERY = 30.0  # seconds between two plain lines
WINDOW = 120.0  # seconds that a rate is measured over, so that it does not jump on a machine that others use too
PAUSE = 0.1  # seconds at least between two measurements
CONSOLE = Console(stderr=True)  # one for all, so that lines and a live bar do not overwrite each other
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


class Progress(Protocol):
    """Told how far long work is: what is done, of how much (None: not known), and a few words about now.

    Parts of an image or a batch may be done, so both are floats.
    """

    def __call__(self, done: float, total: float | None, text: str = "", /) -> object: ...


def no_progress(done: float, total: float | None, text: str = "", /) -> None:
    """Nobody watches."""


def part_of(progress: Progress, before: float, after: float | None, text: str = "") -> Progress:
    """The progress of a part of longer work.

    `before` is done already, `after` follows (None: not known how much); `text` goes before the part's own.
    """

    def tell(done: float, total: float | None, own: str = "", /) -> None:
        whole = None if total is None or after is None else before + total + after
        progress(before + done, whole, ", ".join(words for words in (text, own) if words))

    return no_progress if progress is no_progress else tell


def scaled(progress: Progress, units: float) -> Progress:
    """The progress of work that counts as so many `units`, whatever it is told in: 3 of 4 is three quarters of them."""

    def tell(done: float, total: float | None, text: str = "", /) -> None:
        progress(units * done / total if total else 0.0, units, text)

    return no_progress if progress is no_progress else tell


class Bar:
    """A `Progress` that a person sees, and while it is open the place where messages of the package are printed.

    title: what is being done. shown: whether this process says anything. console: where; default standard error.
    at_most: the work may end early, so the time left is an upper bound.
    """

    def __init__(
        self, title: str, *, shown: bool = True, console: Console | None = None, at_most: bool = False
    ) -> None:
        self.title = title
        self.console = console or CONSOLE
        self.shown = shown
        self.at_most = at_most
        self.done = 0.0
        self.total: float | None = None
        self.text = ""
        self._seen: deque[tuple[float, float]] = deque()  # when, and what was done then
        self._display = Live(console=self.console, refresh_per_second=10, transient=True, get_renderable=self._picture)
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Bar:
        if self.shown:
            self._open.enter_context(messages_shown(self.console))
            if self.console.is_terminal:
                self._open.enter_context(self._display)
            else:
                self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._writer.is_alive():
            self._writer.join()
        self._open.close()

    def __call__(self, done: float, total: float | None, text: str = "", /) -> None:
        self.done, self.total, self.text = done, total, text
        now = time.monotonic()
        if self._seen and done < self._seen[-1][1]:  # a new round
            self._seen = deque()  # another thread may be reading the last one
        if len(self._seen) > 1 and now - self._seen[-2][0] < PAUSE:
            self._seen.pop()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW:
            self._seen.popleft()

    def counts(self) -> str:
        """`128/360`."""
        return f"{int(self.done):,}/{'?' if self.total is None else f'{int(self.total):,}'}"

    def speed(self) -> str:
        """`2.1 per second, 1 min 50 s left`, or nothing as long as it is not known."""
        seen = self._seen or [(0.0, 0.0)]
        (start, before), (now, done) = seen[0], seen[-1]
        if done <= before:
            return ""
        rate = (done - before) / max(now - start, 1e-9)
        words = f"{format_rate(rate)} per second"
        if self.total is None or math.isinf(self.total):
            return words
        return f"{words}, {'at most ' * self.at_most}{format_duration((self.total - self.done) / rate)} left"

    def sentence(self) -> str:
        """`evaluating: 128/360, pgd 43.0 %, 2.1 per second, 1 min 50 s left`."""
        return ", ".join(part for part in (f"{self.title}: {self.counts()}", self.text, self.speed()) if part)

    def _picture(self) -> Group:
        """A bar with numbers and speed, and below it what is being done now, which may be long."""
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.total, completed=self.done, width=40, animation_time=time.monotonic())
        line.add_row(Text(self.title, "bold"), bar, self.counts(), self.speed())
        return Group(line, *([Text(self.text)] if self.text else []))

    def _write(self) -> None:
        """A line now and then, also while one step takes longer than that."""
        while not self._closed.wait(EVERY):
            self.console.print(self.sentence(), **PLAIN)


@contextlib.contextmanager
def messages_shown(console: Console | None = None, *, verbose: bool = False) -> Iterator[None]:
    """Inside, what modules of this package log with `logger.info` and above is printed as lines, once.

    `console` is where; default standard error. `verbose` shows `logger.debug` too. Inside another `messages_shown`,
    that one keeps printing.
    """
    package = logging.getLogger("vitruvius")
    if any(isinstance(handler, _Lines) for handler in package.handlers):
        yield
        return
    handler, level = _Lines(console or CONSOLE), package.level
    package.addHandler(handler)
    package.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


class _Lines(logging.Handler):
    """Prints each message as one line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), **PLAIN)
