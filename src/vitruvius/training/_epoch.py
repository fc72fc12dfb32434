"""One epoch: every batch once, from where the run stands; numbers for the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from vitruvius._errors import Diverged
from vitruvius.training._guards.nonfinite import REMEDY, LossWatch
from vitruvius.training._seeding import batch_seed, seed_batch
from vitruvius.training._session import Session
from vitruvius.training._step import NonFiniteLoss, check_weights, ends_group, pass_over, train_batch

LOOK_EVERY = 10  # batches; looking waits for the device
LOOK_SECONDS = 5.0  # a process that trains alone looks at least so often, so that slow batches are seen one by one


class Watcher(Protocol):
    """Told every few batches: batches done, and the means so far."""

    def __call__(self, done: int, numbers: dict[str, float], /) -> None: ...


class Pauses(Protocol):
    """What may happen between two updates: saving, a look at the alarm, an end. `looked`: the device is not ahead."""

    def between(self, losses: LossWatch, *, before: int, looked: bool) -> None: ...

    def nonfinite(self, losses: LossWatch) -> None: ...


def train_epoch(
    session: Session,
    watch: Watcher,
    pauses: Pauses,
    around_batch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """Train on the batches that are left of this epoch; the means over the whole of it.

    around_batch: what to do around the work of every batch; nothing by default.
    """
    session.task.train()
    loader = session.train_loader
    means = session.means
    losses = LossWatch(session.process)
    batches = len(loader)
    begun = looked_at = time.perf_counter()
    elapsed = session.elapsed
    loader.set_epoch(session.epoch, session.batch)
    for number, (x, y, ids) in enumerate(loader.every_batch(), session.batch):
        before, session.rate = session.updates, session.optimizer.param_groups[0]["lr"]
        with around_batch():
            numbers = _train_batch(session, x, y, number, batches, losses, ids, pauses)
        if numbers is not None:
            means.add(numbers, len(x))
            losses.add(number, numbers["loss"], ids)
        session.batch, session.elapsed = number + 1, elapsed + time.perf_counter() - begun
        looked = _is_look_due(session, number, batches, looked_at)
        if looked:
            looked_at = time.perf_counter()
            pauses.nonfinite(losses)
            so_far = means.read()
            if so_far:
                session.elapsed = elapsed + time.perf_counter() - begun  # the device has done all that counts
                watch(number + 1, {**so_far, "images": means.images, "seconds": session.elapsed})
        if ends_group(session, number, batches):
            pauses.between(losses, before=before, looked=looked)
    return _row(session)


def _is_look_due(session: Session, number: int, batches: int, looked_at: float) -> bool:
    """After every tenth batch and the last; after slow ones too where no other process must look at the same moment."""
    if number % LOOK_EVERY == LOOK_EVERY - 1 or number == batches - 1:
        return True
    return session.process.world_size == 1 and time.perf_counter() - looked_at >= LOOK_SECONDS


def _train_batch(
    session: Session,
    x: Tensor,
    y: Tensor,
    number: int,
    batches: int,
    losses: LossWatch,
    ids: Tensor,
    pauses: Pauses,
) -> dict[str, Tensor] | None:
    """`train_batch` with the dice of this batch; a non-finite loss is reported with its images."""
    process = session.process
    if not len(x):
        pass_over(session, number, batches)
        return None
    seed = session.config.seed
    seed_batch(seed=seed, epoch=session.epoch, batch=number, rank=process.rank, device=process.device)
    session.task.draws.begin(batch_seed(seed=seed, epoch=session.epoch, batch=number), process.device)
    try:
        return train_batch(session, x.to(process.device), y.to(process.device), number, batches)
    except NonFiniteLoss as error:
        losses.add(number, error.loss, ids)
        pauses.nonfinite(losses)
        raise


def _row(session: Session) -> dict[str, float]:
    numbers = session.means.read()
    if not numbers:
        raise Diverged(f"every batch of epoch {session.epoch + 1} was left out: no loss was a number. {REMEDY}")
    if not check_weights(session):
        raise Diverged(f"weights are no longer finite after epoch {session.epoch + 1}. {REMEDY}")
    seconds = session.elapsed
    row = {f"train_{name}": value for name, value in numbers.items()}
    if session.config.train.nonfinite == "skip":
        row["skipped_updates"] = session.skipped
    return row | {"lr": session.rate, "seconds": seconds, "images_per_second": session.means.images / seconds}
