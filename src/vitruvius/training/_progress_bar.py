"""What a person sees while training: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitruvius._bar import Pace
from vitruvius.training._session import Session

logger = logging.getLogger(__name__)

EVERY = 30.0  # seconds between two lines about something slow, and about an epoch without a terminal


def make_teller(console: Console | None, *, shown: bool) -> Callable[[str], None]:
    """What says a line about the beginning of a run: on the console, or in the log where none is shown."""
    if not shown:
        return logger.info
    where = console or Console(stderr=True)
    return lambda text: where.print(text, highlight=False, markup=False, soft_wrap=True)


class FirstBatch:
    """The first batch of a run, which waits for data and for the compiler: says how long it took, and that it does.

    tell: says one line. compiles: whether the model is compiled in it. every: seconds between two lines.
    """

    def __init__(self, tell: Callable[[str], None], *, compiles: bool, every: float = EVERY) -> None:
        self.tell = tell
        self.compiles = compiles
        self.every = every
        self.over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the work of the batch; afterwards and later on nothing is said."""
        if self.over.is_set():
            yield
            return
        begun = time.perf_counter()
        if self.compiles:
            self.tell("compiling the model for the first batch")
        thread = threading.Thread(target=self._remind, args=(begun,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()
        self.tell(f"first batch: {time.perf_counter() - begun:.1f} s{self._with_compiling()}")

    def _remind(self, begun: float) -> None:
        doing = "at the first batch"
        if self.compiles:
            doing = "compiling"
        while not self.over.wait(self.every):
            self.tell(f"still {doing} after {time.perf_counter() - begun:.0f} s")

    def _with_compiling(self) -> str:
        if self.compiles:
            return ", compiling included"
        return ""


class Bar:
    """One bar over all epochs, with rate, time left, loss and accuracy; a line an epoch without a terminal."""

    @classmethod
    def of(cls, session: Session, *, shown: bool, console: Console | None = None) -> Bar:
        batches = len(session.train_loader)
        held = "held-out" if session.config.train.holdout else session.config.data.val_split
        return cls(
            epochs=session.num_epochs, start=session.epoch, batches=batches, shown=shown, console=console, held=held
        )

    def __init__(
        self,
        *,
        epochs: int,
        start: int,
        batches: int,
        shown: bool,
        console: Console | None = None,
        held: str = "held-out",
    ) -> None:
        self.held = held
        self.console = console or Console(stderr=True)
        self.epochs, self.batches, self.shown = epochs, batches, shown
        self.current = start
        self.live = shown and self.console.is_terminal
        self.said_at = time.monotonic()
        self.alarms = 0  # so far
        self.doing = ""  # what is done now, for a plain line
        self.pace = Pace()  # of batches
        self.left = float(epochs * batches - start * batches)
        self._stopped = threading.Event()
        self._log = threading.Thread(target=self._write, daemon=True)
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.bar = self.progress.add_task("", total=epochs * batches, completed=start * batches, numbers="")

    def __enter__(self) -> Bar:
        self.progress.start()
        if self.shown and not self.live:
            self._log.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._log.is_alive():
            self._log.join()
        self.progress.stop()

    def start(self, epoch: int, done: int = 0) -> None:
        """Before an epoch, of which some batches may be `done`."""
        self.current = epoch
        self.doing = f"epoch {epoch + 1}/{self.epochs}  batch {done:,} of {self.batches:,}"
        self._count(done)
        self.progress.update(self.bar, completed=epoch * self.batches + done)

    def batch(self, done: int, numbers: dict[str, float], /) -> None:
        """After some batches of the current epoch."""
        rate = numbers["images"] / numbers["seconds"]
        text = f"loss {numbers['loss']:.3f}  accuracy {100 * numbers['accuracy']:5.1f} %  {rate:,.0f} images/s"
        self.progress.update(
            self.bar,
            completed=self.current * self.batches + done,
            description=f"epoch {self.current + 1}/{self.epochs}",
            numbers=text,
        )
        self.doing = f"epoch {self.current + 1}/{self.epochs}  batch {done:,} of {self.batches:,}  {text}"
        self._count(done)

    def looking(self, what: str) -> None:
        """After the batches of an epoch: the model is judged on images, `what` they are."""
        self.doing = f"epoch {self.current + 1}/{self.epochs}  judging the {what} images"
        self.progress.update(self.bar, numbers=f"judging the {what} images")

    def epoch(self, row: dict[str, Any]) -> None:
        """After an epoch: one line that stays."""
        if self.shown:
            self._say(line(row, self.epochs, self.held, alarms_before=self.alarms))
        self.alarms = row.get("alarms", 0)

    def noting(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """What says a line by `tell`, so that the bar knows that something was said."""

        def say(text: str) -> None:
            self.said_at = time.monotonic()
            tell(text)

        return say

    def _count(self, done: int) -> None:
        batches = self.current * self.batches + done
        self.pace.note(batches)
        self.left = float(self.epochs * self.batches - batches)

    def _write(self) -> None:
        """Where the run is, if nothing has been said about it for half a minute, whatever takes so long."""
        while not self._stopped.wait(min(1.0, EVERY / 2)):
            if time.monotonic() - self.said_at >= EVERY:
                self._say("  ".join(part for part in (self.doing, *self.pace.time_left(self.left)) if part))

    def _say(self, text: str) -> None:
        self.said_at = time.monotonic()
        self.console.print(text, highlight=False, soft_wrap=True)


def line(row: dict[str, Any], epochs: int, held: str = "held-out", *, alarms_before: int = 0) -> str:
    """`epoch 3/10  loss 0.412  accuracy 91.2 %  held-out 93.1 % (robust 41.0 %)  1,204 images/s`.

    Alarms are counted over the run; those of this epoch are told.
    """
    text = (
        f"epoch {row['epoch'] + 1:>{len(str(epochs))}}/{epochs}  loss {row['train_loss']:.3f}  "
        f"accuracy {100 * row['train_accuracy']:5.1f} %"
    )
    for name, key in ((held, "val"), ("EMA", "ema")):
        if f"{key}_accuracy" in row:
            text += f"  {name} {100 * row[f'{key}_accuracy']:5.1f} %"
        if f"{key}_robust_accuracy" in row:
            text += f" (robust {100 * row[f'{key}_robust_accuracy']:4.1f} %)"
    if row.get("skipped_updates"):
        text += f"  {row['skipped_updates']} update(s) skipped"
    if row.get("alarms", 0) > alarms_before:
        single, multi = 100 * row["single_step_accuracy"], 100 * row["multi_step_accuracy"]
        text += f"  ALARM {row['alarms']} (one step {single:.1f} %, several {multi:.1f} %)"
    return f"{text}  {row['images_per_second']:,.0f} images/s"
