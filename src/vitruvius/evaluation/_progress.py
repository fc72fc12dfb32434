"""How far an evaluation is: the threat, its stage and step, images that are still robust, rate and time left."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitruvius._bar import Pace
from vitruvius._checks import PacedProgress, Progress
from vitruvius._format import format_rate
from vitruvius.attacks import Ensemble, StageEvent, StepProgress, disturb, watched_by


class RoundProgress:
    """One round of some threats over the images.

    progress: told how far it is. total: images of the round; None: not known. place: which round this is, in words.
    """

    def __init__(self, progress: Progress | None, total: int | None, place: str = "") -> None:
        self.progress = progress
        self.total = total
        self.place = place
        self.done = 0  # images that are through
        self._images = Pace()
        self._passes = Pace()
        self._steps = Pace()
        self._finished_passes = 0.0  # of pools before this one
        self._finished_steps = 0
        self._step = 0  # of the attempt that runs
        self._attempt: tuple[str, int] | None = None

    def at(self, done: float, words: str) -> None:
        """So many images, and parts of images, are done."""
        self._images.note(done)
        left = None
        if self.total is not None:
            left = self.total - done
        said: list[str] = []
        if self._images.rate > 0:
            said = [f"{format_rate(self._images.rate)} images/s", *self._images.time_left(left)]
        self._tell(int(done), words, said)

    def event(self, name: str, event: StageEvent, pool: int) -> None:
        """An ensemble is this far with the images of a pool, of which those that are broken are done."""
        self._count_steps(event)
        said = []
        if self._steps.rate > 0:
            said.append(f"{format_rate(self._steps.rate)} steps/s")
        if event.left is not None:
            self._passes.note(self._finished_passes + event.spent)
            said += self._passes.time_left(self._passes_left(event, pool), at_most=True)
        words = f"{name}: {event.stage} ({event.number} of {event.stages}){_attempt_in_words(event)}"
        if event.steps:
            words += f", step {event.step} of {event.steps}"
        self._tell(self.done + pool - event.robust, f"{words}, {event.robust} of {event.images} still robust", said)

    def end_pool(self, images: int) -> None:
        """The images of a pool are through."""
        self.done += images
        self._attempt = None

    def _passes_left(self, event: StageEvent, pool: int) -> float:
        """Of this pool, and of those after it if they are like this one."""
        assert event.left is not None
        later = 0.0
        if self.total is not None:
            later = max(self.total - self.done - pool, 0) / max(pool, 1)
        return event.left + later * (event.spent + event.left)

    def _count_steps(self, event: StageEvent) -> None:
        attempt = (event.stage, event.attempt)
        if attempt != self._attempt or event.step < self._step:
            self._finished_steps += self._step
            self._attempt = attempt
        self._step = event.step
        self._steps.note(self._finished_steps + self._step)

    def _tell(self, done: int, words: str, said: list[str]) -> None:
        if self.progress is None:
            return
        if isinstance(self.progress, PacedProgress):
            self.progress.pace(", ".join(said))
        self.progress(done, self.total, f"{self.place}{words}")


def _attempt_in_words(event: StageEvent) -> str:
    """`, run 3 of 9`, or several that run side by side."""
    if event.attempts <= 1:
        return ""
    if event.together > 1:
        return f", runs {event.attempt} to {event.attempt + event.together - 1} of {event.attempts} side by side"
    return f", run {event.attempt} of {event.attempts}"


def disturb_with_progress(
    threat: Any, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, *, round: RoundProgress, name: str, so_far: str
) -> Tensor:
    """x' of a batch by a threat, and meanwhile how far it is; `so_far` is what is known of the batches before."""
    if isinstance(threat, Ensemble) and "on_event" in inspect.signature(threat.run).parameters:
        extras: dict[str, Any] = {"on_event": lambda event: round.event(name, event, len(x))}
        return threat.run(model, x, y, ids=ids, **extras).x
    with watched_by(step_progress(round, len(x), so_far)):
        return disturb(threat, model, x, y, ids)


def step_progress(round: RoundProgress, images: int, so_far: str) -> StepProgress:
    """The steps of an attack on a batch of so many `images` as progress of the round."""
    return StepProgress(lambda share, words: round.at(round.done + share * images, f"{so_far}, {words}"))


class CheckProgress:
    """The checks against gradient masking, one after the other: which one, its step, images robust to the white box.

    progress: told how far they are. images: how many are looked at. plan: checks by name, and roughly how many passes
    of the model each takes for an image.
    """

    def __init__(self, progress: Progress | None, images: int, plan: Mapping[str, float]) -> None:
        self.progress = progress
        self.images = images
        self.plan = dict(plan)
        self.name = ""
        self.robust: int | None = None
        self._finished: list[str] = []
        self._pace = Pace()

    def begin(self, name: str, passes: float = 0.0) -> None:
        """The check of this name begins; one that was not planned takes so many passes."""
        self.plan.setdefault(name, passes)
        if self.name:
            self._finished.append(self.name)
        self.name = name
        self._tell(0.0, "")

    def of_batch(self, number: int, batches: int) -> StepProgress:
        """The steps of an attack on batch `number` (from 1) of `batches`."""
        words = ""
        if batches > 1:
            words = f", batch {number} of {batches}"
        return StepProgress(lambda share, step: self._tell((number - 1 + share) / batches, f"{words}, {step}"))

    def _tell(self, share: float, words: str) -> None:
        if self.progress is None:
            return
        done = sum(self.plan[name] for name in self._finished) + share * self.plan[self.name]
        self._pace.note(max(done, self._pace.count))  # a check may be of several attacks
        if isinstance(self.progress, PacedProgress) and self._pace.rate > 0:
            rate = f"{format_rate(self.images * self._pace.rate)} passes of images/s"
            self.progress.pace(", ".join([rate, *self._pace.time_left(sum(self.plan.values()) - done)]))
        if self.robust is not None:
            words += f", {self.robust} of {self.images} images robust to the white box"
        self.progress(len(self._finished), len(self.plan), f"{self.name}{words}")
