"""What happens after every epoch besides training: analyses, trackers, and whatever a caller of `train` brings."""

from __future__ import annotations

import json
from typing import Protocol

from torch import nn

from vitruvius._files import atomic_write_text
from vitruvius.analysis.callback import FILE, AnalysisCallback, first_images, rows_with_analyses
from vitruvius.tracking.base import Trackers
from vitruvius.training.run_folder import Run
from vitruvius.training.session import Session


class Callback(Protocol):
    """Called after every epoch, on the first process, when its files are written.

    `epoch` counts from 0; `model` is the one that is evaluated, in eval or train mode.
    """

    def epoch_end(self, epoch: int, model: nn.Module) -> object: ...


class Analyses:
    """An analysis callback whose file holds the epochs that the state knows, each once."""

    def __init__(self, inside: AnalysisCallback, run: Run) -> None:
        self.inside, self.file = inside, run.folder / FILE

    @classmethod
    def of(cls, session: Session, run: Run) -> list[Analyses]:
        """What the recipe asks of fixed images; a list of one, or of none."""
        config = session.config
        if not config.analyses:
            return []
        batches = {
            name: first_images(loader, config.train.analyse_images)
            for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
        }
        inside = AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=run.folder)
        analyses = cls(inside, run)
        analyses._forget(session.epoch)
        if session.batch == 0 and session.epoch > 0 and session.replica is None:  # a kill may have cut the last answer
            analyses.epoch_end(session.epoch - 1, session.eval_model())
        return [analyses]

    def epoch_end(self, epoch: int, model: nn.Module) -> object:
        """Ask, after forgetting what an earlier attempt at this epoch has left."""
        self._forget(epoch)
        return self.inside.epoch_end(epoch, model)

    def _forget(self, epoch: int) -> None:
        """Lines of this epoch and later ones, and a line that was cut off."""
        if not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8")
        earlier = [line for line in text.split("\n")[:-1] if json.loads(line)["epoch"] < epoch]
        if (wanted := "".join(f"{line}\n" for line in earlier)) != text:
            atomic_write_text(self.file, wanted)


class Tracking:
    """Shows the trackers all rows so far, with the answers of the analyses."""

    def __init__(self, session: Session, run: Run, trackers: Trackers) -> None:
        self.session, self.run, self.trackers = session, run, trackers

    def epoch_end(self, epoch: int, model: nn.Module) -> None:
        self.trackers.log(rows_with_analyses(self.session.rows, self.run.folder))
