"""What happens after every epoch besides training: analyses, trackers, and whatever a caller of `train` brings."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from vitruvius.analysis.callback import AnalysisCallback, first_images, rows_with_analyses
from vitruvius.tracking.base import Trackers
from vitruvius.training.run_folder import Run
from vitruvius.training.session import Session


class Callback(Protocol):
    """Called after every epoch, on the first process, when its files are written.

    `epoch` counts from 0; `model` is the one that is evaluated, in eval or train mode.
    """

    def epoch_end(self, epoch: int, model: nn.Module) -> object: ...


def analyses_of(session: Session, run: Run) -> list[AnalysisCallback]:
    """What the recipe asks of fixed images after epochs, the first of which are done; a list of one, or of none."""
    config = session.config
    if not config.analyses:
        return []
    batches = {
        name: first_images(loader, config.train.analyse_images)
        for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
    }
    callback = AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=run.folder)
    callback.forget(session.epoch)
    if session.batch == 0 and session.epoch > 0 and session.replica is None:  # a kill may have cut the last answer
        callback.epoch_end(session.epoch - 1, session.eval_model())
    return [callback]


class Tracking:
    """Shows the trackers all rows so far, with the answers of the analyses."""

    def __init__(self, session: Session, run: Run, trackers: Trackers) -> None:
        self.session, self.run, self.trackers = session, run, trackers

    def epoch_end(self, epoch: int, model: nn.Module) -> None:
        self.trackers.log(rows_with_analyses(self.session.rows, self.run.folder))
