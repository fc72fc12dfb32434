"""How far long work is: a live display in a terminal, elsewhere a plain line every half minute (no log is empty)."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from vitruvius._format import format_duration, format_rate

EVERY = 30.0  # seconds between two plain lines
WINDOW = 120.0  # seconds that a rate is measured over, so that it does not jump on a machine that others use too
PAUSE = 0.1  # seconds at least between two measurements


class Pace:
    """How fast a count rises, over the last two minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # when, and the count

    def note(self, count: float) -> None:
        """The count is this high now; a lower one than before begins a new round."""
        now = time.monotonic()
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        if len(self._seen) > 1 and now - self._seen[-2][0] < PAUSE:
            self._seen.pop()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW:
            self._seen.popleft()

    @property
    def count(self) -> float:
        """The last one noted."""
        if not self._seen:
            return 0.0
        return self._seen[-1][1]

    @property
    def rate(self) -> float:
        """Per second; 0 as long as it is not known."""
        if len(self._seen) < 2:
            return 0.0
        (begun, before), (now, count) = self._seen[0], self._seen[-1]
        return (count - before) / max(now - begun, 1e-9)

    def time_left(self, left: float | None, *, at_most: bool = False) -> list[str]:
        """`["1 min 50 s left"]` for what is `left` to count, or nothing where that is not known.

        `at_most`: less may be left than was counted here.
        """
        if left is None or math.isinf(left) or self.rate <= 0:
            return []
        words = f"{format_duration(left / self.rate)} left"
        if at_most:
            words = f"at most {words}"
        return [words]


class Bar:
    """Told how far some work is, and a few words about it.

    title: what is being done. shown: whether this process says anything. console: where; default standard error.
    """

    def __init__(self, title: str, *, shown: bool = True, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self.shown = shown
        self.live = shown and self.console.is_terminal
        self.done = 0
        self.total: int | None = None
        self.words = ""
        self._own_pace = Pace()
        self._pace = ""  # as whoever works says
        self.bars = _Display(self)
        self.bar = self.bars.add_task("", total=None)
        self._stopped = threading.Event()
        self._log = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Bar:
        self.bars.start()
        if self.shown and not self.live:
            self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._log.is_alive():
            self._log.join()
        self.bars.stop()

    def __call__(self, done: float, total: float | None, words: str = "", /) -> None:
        self.done, self.total, self.words = int(done), None if total is None else int(total), words
        self._own_pace.note(done)
        self.bars.update(self.bar, completed=done, total=total)

    def pace(self, text: str, /) -> None:
        """Rate and time left, where images alone do not tell them: `38 steps/s, at most 2 min 10 s left`."""
        self._pace = text

    def line(self, text: str) -> None:
        """One line that stays, above the live bar or in the log."""
        if self.shown:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sentence(self) -> str:
        """`evaluating: 128/360, pgd 43.0 %, 2.1 per second, 1 min 50 s left`."""
        known = "?"
        if self.total is not None:
            known = str(self.total)
        return ", ".join(part for part in (f"{self.title}: {self.done}/{known}", self.words, self.speed()) if part)

    def speed(self) -> str:
        """Rate and time left."""
        if self._pace or self._own_pace.rate <= 0:
            return self._pace
        left = None
        if self.total is not None:
            left = self.total - self.done
        return ", ".join([f"{format_rate(self._own_pace.rate)} per second", *self._own_pace.time_left(left)])

    def _write(self) -> None:
        """A line now and then, also while one step takes longer than that."""
        while not self._stopped.wait(EVERY):
            self.line(self.sentence())


class _Display(Progress):
    """A bar with numbers and speed, and below it what is being done now, which may be long."""

    def __init__(self, bar: Bar) -> None:
        self.of = bar
        columns = (
            TextColumn(f"[bold]{bar.title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        super().__init__(*columns, console=bar.console, transient=True, disable=not bar.live)

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            task.fields["speed"] = self.of.speed()
        yield self.make_tasks_table(self.tasks)
        if self.of.words:
            yield Text(self.of.words)
