"""The loop over epochs: train, look, choose, keep, tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from vitruvius._signals import GRACE, LONGEST, set_grace_period
from vitruvius.analysis import rows_with_analyses
from vitruvius.compression.files import load_maps, load_masks
from vitruvius.compression.gradual import GradualMask
from vitruvius.tracking import Trackers
from vitruvius.training._epoch import train_epoch
from vitruvius.training._guards.means import Means
from vitruvius.training._progress_bar import Bar, FirstBatch
from vitruvius.training._run.folder import Run
from vitruvius.training._run.keeper import Keeper, RolledBack, keep
from vitruvius.training._selection import Selection
from vitruvius.training._session import Session
from vitruvius.training._step import compiles, make_fast_step

logger = logging.getLogger(__name__)


class Callback(Protocol):
    """Told after every epoch, on the first process, when its files are written.

    `epoch` counts from 0; `model` is the one that is evaluated, in eval or train mode.
    """

    def epoch_end(self, epoch: int, model: nn.Module) -> object: ...


@dataclass
class Loop:
    """A session and all who have to do with its epochs."""

    session: Session
    run: Run
    keeper: Keeper
    selection: Selection
    trackers: Trackers
    bar: Bar
    analyses: Sequence[Callback] = ()  # asked before the trackers are told, which show their answers
    callbacks: Sequence[Callback] = ()
    tell: Callable[[str], None] = logger.info  # says a line about what is compiled or recorded

    def run_epochs(self) -> None:
        """Until the last epoch is done."""
        session, gradual = self.session, gradual_of(self.session)
        session.fast_step = make_fast_step(session, self.tell)
        self.first_batch = FirstBatch(self.bar.noting(self.tell), compiles=compiles(session))
        with self.bar:
            while session.epoch < session.num_epochs:
                self.bar.start(session.epoch, done=session.batch)
                start_epoch(session, gradual)
                try:
                    row = self._train()
                except RolledBack:
                    session.fast_step = make_fast_step(session, self.tell)  # recordings hold the state that was left
                    continue
                self._finish(row, final=gradual is None or gradual.finished(session.epoch))
                self._tell(row)
                if session.epoch < session.num_epochs:
                    self.keeper.leave_if_asked()

    def _train(self) -> dict[str, Any]:
        """One epoch, or what is left of it, and a look at what it has brought."""
        session = self.session
        numbers = train_epoch(session, self.bar.batch, self.keeper, self.first_batch.watched)
        row: dict[str, Any] = {"epoch": session.epoch, **numbers}
        session.agree_on_statistics()
        self.keeper.alarms_before = session.alarms
        set_grace_period(LONGEST)  # an epoch is worth waiting for
        if self.keeper.alarm is not None:
            row |= self.keeper.watch().row() | {"alarms": session.alarms, "rollbacks": session.rollbacks}
        last = session.epoch + 1 == session.num_epochs
        if last or (session.epoch + 1) % session.config.train.evaluate_every == 0:
            self.bar.looking(self.bar.held)
            row |= self.selection.look(self.keeper.leave_while_looking)
        return row

    def _finish(self, row: dict[str, Any], *, final: bool) -> None:
        """Count the epoch, move a schedule that goes by epochs, judge whether these weights are the best, and keep.

        Weights that were trained with looser masks than the `final` ones are never the best.
        """
        session = self.session
        session.rows.append(row)
        session.epoch, session.batch, session.elapsed, session.skipped = session.epoch + 1, 0, 0.0, 0
        session.means = Means(session.process)
        if session.scheduler is not None:
            session.scheduler.step(session.epoch, self.selection.metric(row))
        if final:
            self.selection.choose(row)
        keep(session, self.run)
        set_grace_period(GRACE)

    def _tell(self, row: dict[str, Any]) -> None:
        self.bar.epoch(row)
        model = self.session.eval_model()  # every process must ask
        if self.session.process.first:
            for analysis in self.analyses:
                analysis.epoch_end(self.session.epoch - 1, model)
            self.trackers.log(rows_with_analyses(self.session.rows, self.run.folder))
            for callback in self.callbacks:
                callback.epoch_end(self.session.epoch - 1, model)
            self.run.push()


def gradual_of(session: Session) -> GradualMask | None:
    """What the recipe asks for; files and sites are checked by putting the first pattern in."""
    asked = session.config.gradual
    if asked is None:
        return None
    final, maps = load_masks(asked.masks).keep, load_maps(asked.maps)[0]
    gradual = GradualMask(final, maps, epochs=asked.epochs, power=asked.power)
    start_epoch(session, gradual)
    return gradual


def start_epoch(session: Session, gradual: GradualMask | None) -> None:
    """The pattern of this epoch, in the weights and in their running average."""
    if gradual is None:
        return
    gradual.epoch_start(session.epoch, session.model)
    if session.task.has_ema():
        gradual.epoch_start(session.epoch, session.eval_model(ema=True))
