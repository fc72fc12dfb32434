"""Watching a search from outside: how far it is, and what it has decided.

A search of many images is one call that may take hours. Whoever calls it may watch: `with watched_by(watch): …`.
Without a watch nothing is noted. Rows are indices into the images that were given to the search.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch import Tensor

PAUSE = 0.1  # seconds at least between two words about the steps of a search


class SearchWatch:
    """Sees a search and notes nothing; watches override what they want to know."""

    def begin(self, attempt: int, attempts: int, images: int, together: int = 1) -> None:
        """Attempt number `attempt` (from 0) of `attempts` begins on this many `images`, `together` of them at once."""

    def stepped(self, left: int, steps: int) -> None:
        """One more step is made; at most `left` follow in what has begun, which takes at most `steps` in all."""

    def searched(self, images: int, fooled: int) -> None:
        """This many more `images` have been searched in this attempt, of which the model is wrong about `fooled`."""

    def settled(self, rows: Tensor, points: Tensor) -> None:
        """The search is through with these rows: `points` are what it will return for them."""

    def attempted(self, attempt: int, rows: Tensor) -> None:
        """These `rows` are through with all attempts up to number `attempt`, and not fooled."""

    def attempts_made(self) -> Tensor | None:
        """(B,) attempts that an earlier, interrupted search has made on each image in vain; None: there was none."""
        return None


class StepProgress(SearchWatch):
    """The steps of an attack on one batch, as progress.

    tell: called a few times a second with the share of the batch's work that is done, and the step in words.
    """

    def __init__(self, tell: Callable[[float, str], object]) -> None:
        self.tell = tell
        self.attempt = 0
        self.attempts = 1
        self.together = 1
        self._told_at = time.monotonic()

    def begin(self, attempt: int, attempts: int, images: int, together: int = 1) -> None:
        self.attempt, self.attempts, self.together = attempt, attempts, together

    def stepped(self, left: int, steps: int) -> None:
        if time.monotonic() - self._told_at < PAUSE:
            return
        self._told_at = time.monotonic()
        share = (self.attempt + self.together * (1 - left / max(steps, 1))) / self.attempts
        words = f"step {steps - left} of {steps}"
        if self.attempts > 1:
            words = f"run {self.attempt + 1} of {self.attempts}, {words}"
        self.tell(share, words)


UNWATCHED = SearchWatch()
_watch: ContextVar[SearchWatch | None] = ContextVar("watch", default=None)


def current_watch() -> SearchWatch:
    """Who watches the search that is running."""
    return _watch.get() or UNWATCHED


@contextlib.contextmanager
def watched_by(watch: SearchWatch) -> Iterator[None]:
    """Searches inside are seen by this `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watched_range(*ends: int) -> Iterator[int]:
    """`range(*ends)`, every step of which is seen by whoever watches the search."""
    steps = range(*ends)
    watch = current_watch()
    for made, step in enumerate(steps, 1):
        yield step
        watch.stepped(len(steps) - made, len(steps))
