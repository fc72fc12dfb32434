"""What an ensemble tells while it runs: events for whoever looks on, and decisions for whoever keeps them.

A journal makes a killed ensemble go on where it stopped: it is told, batch by batch, which images a stage has broken
and which have survived it, and it is asked what it knows before a stage begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from vitruvius.attacks._search import watch as _watch
from vitruvius.attacks._search.watch import SearchWatch

if TYPE_CHECKING:
    from vitruvius.attacks._ensemble.cascade import Cascade


class StageEvent(NamedTuple):
    """How far an ensemble is."""

    stage: str  # apgd-t
    number: int  # of the stage, from 1
    stages: int  # how many there are
    attempt: int  # of the stage, from 1: restarts, targets
    attempts: int
    searched: int  # images (in several attempts side by side: searches) done in this attempt
    to_search: int
    robust: int  # images that nothing has broken so far
    images: int  # all of them
    finished: bool = False  # whether the stage has ended
    together: int = 1  # attempts that run side by side, from `attempt` on
    step: int = 0  # steps made in this attempt
    steps: int = 0  # at most
    spent: float = 0.0  # passes of a batch through the model so far, in all stages; a gradient counts as three
    left: float | None = None  # of them at most, in this stage and all later ones; None: not known


OnEvent = Callable[[StageEvent], object]


class Journal(Protocol):
    """Keeps what the stages of an ensemble decide. Images go by their ids (B,) int64, on the CPU."""

    def survivors(self, stage: str, ids: Tensor) -> Tensor:
        """(B,) bool: images that this stage has failed to break in an earlier run; they are not searched again.

        `stage` is its label, `ids` (B,) theirs.
        """
        ...

    def attempts_made(self, stage: str, ids: Tensor) -> Tensor:
        """(B,) int64: attempts of this stage that an earlier run has made on each image in vain.

        `stage` is its label, `ids` (B,) name the images.
        """
        ...

    def settle(self, stage: str, ids: Tensor, x: Tensor, y: Tensor, broken: Tensor) -> None:
        """A stage is through with these images: `x` (B, …) is x' where `broken` (B,), else the worst point it found.

        `stage` is its label; `ids` (B,) and `y` (B,) are the ids and labels of the images.
        """
        ...

    def attempted(self, stage: str, attempt: int, ids: Tensor) -> None:
        """These images have survived all attempts of a stage up to this one (from 0).

        `stage` is its label, `attempt` the number of the last one made, `ids` (B,) name the images.
        """
        ...

    def keep(self, kind: str, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Facts of a search on a faster view, beside what its stages decide: `columns` (B, …) about images `ids` (B,).

        `kind` names them; `points` are images and large.
        """
        ...

    def recall(self, kind: str) -> dict[str, Tensor]:
        """What was kept as this `kind` about images of the pool, `id` among the columns; nothing where nothing was."""
        ...


class StepWatch(SearchWatch):
    """Sees only the steps of a search and hands them on to `watch`: what is inside may be about other images."""

    def __init__(self, watch: SearchWatch) -> None:
        self.watch = watch

    def begin(self, attempt: int, attempts: int, images: int, together: int = 1) -> None:
        self.watch.begin(attempt, attempts, images, together)

    def stepped(self, left: int, steps: int) -> None:
        self.watch.stepped(left, steps)


class StageWatch(SearchWatch):
    """Watches the search of one stage on some rows of a cascade; hands on what is decided, a batch at a time.

    `portions_left` more portions of rows are searched after this one.
    """

    def __init__(self, cascade: Cascade, stage: str, rows: Tensor, portions_left: int = 0) -> None:
        self.cascade = cascade
        self.stage = stage
        self.rows = rows
        self.portions_left = portions_left
        self.open = torch.ones_like(rows, dtype=torch.bool)  # rows that nothing has been decided about
        self.robust = cascade.count_robust()
        self.event = cascade.event(stage, to_search=len(rows))
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._told_at = -math.inf

    def begin(self, attempt: int, attempts: int, images: int, together: int = 1) -> None:
        self.event = self.event._replace(
            attempt=attempt + 1, attempts=attempts, together=together, searched=0, to_search=images, step=0, steps=0
        )
        self.cascade.tell(self.event)

    def stepped(self, left: int, steps: int) -> None:
        """Told on a few times a second."""
        self.cascade.count_step(self.stage)
        if time.monotonic() - self._told_at < _watch.PAUSE:
            return
        self._told_at = time.monotonic()
        event = self.event
        attempts_left = event.attempts - event.attempt + 1 - event.together
        further = math.ceil(attempts_left / event.together) + self.portions_left * event.attempts
        ahead = self.cascade.passes_left(self.stage, left + further * steps, event.robust)
        self.event = event._replace(step=steps - left, steps=steps, spent=self.cascade.spent, left=ahead)
        self.cascade.tell(self.event)

    def searched(self, images: int, fooled: int) -> None:
        self.event = self.event._replace(
            searched=self.event.searched + images, robust=max(self.event.robust - fooled, 0)
        )
        self.cascade.tell(self.event)

    def settled(self, rows: Tensor, points: Tensor) -> None:
        if self.cascade.journal is None or not len(rows):
            return
        self._waiting.append((rows, points))
        if sum(len(waiting) for waiting, _ in self._waiting) >= self.cascade.batch_size:
            self.flush()

    def attempted(self, attempt: int, rows: Tensor) -> None:
        journal = self.cascade.journal
        if journal is not None and len(rows) and not self.cascade.is_first_search:
            journal.attempted(self.stage, attempt, self.cascade.ids[self.rows[rows]].cpu())

    def attempts_made(self) -> Tensor | None:
        """Of the first stage the best point of all attempts is kept, so none can be left out."""
        journal = self.cascade.journal
        if journal is None or self.cascade.is_first_search:
            return None
        made = journal.attempts_made(self.stage, self.cascade.ids[self.rows].cpu())
        return made.to(self.rows.device)

    def flush(self) -> None:
        """Judge what waits, and hand it on."""
        if not self._waiting:
            return
        rows = torch.cat([rows for rows, _ in self._waiting])
        points = torch.cat([points for _, points in self._waiting])
        self._waiting.clear()
        self.open[rows] = False
        self.cascade.judge(self.stage, points, self.rows[rows])

    def close(self, moved: Tensor) -> None:
        """The search has ended with these points for all of its rows: judge those that are still open."""
        self.flush()
        left = self.open.nonzero().squeeze(1)
        if len(left):
            self.cascade.judge(self.stage, moved[left], self.rows[left])
