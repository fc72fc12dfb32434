"""Analyses while a recipe trains: their curves in analysis.jsonl, every epoch once, also after a stop or a rollback."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from vitruvius._files import atomic_write_text
from vitruvius.analysis import AnalysisCallback, first_images
from vitruvius.analysis.callback import FILE
from vitruvius.training._session import Session


class Curves:
    """An analysis callback whose file is what the run knows, not more and not less."""

    def __init__(self, inside: AnalysisCallback, folder: Path) -> None:
        self.inside, self.file = inside, folder / FILE

    @classmethod
    def of(cls, session: Session, folder: Path) -> list[Curves]:
        """What the recipe asks of fixed images; a list of one, or of none."""
        config = session.config
        if not config.analyses:
            return []
        batches = {
            name: first_images(loader, config.train.analyse_images)
            for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
        }
        inside = AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=folder)
        curves = cls(inside, folder)
        curves.mend(session)
        return [curves]

    def epoch_end(self, epoch: int, model: nn.Module) -> object:
        """Ask, after forgetting what an earlier attempt at this epoch has left."""
        self._forget(epoch)
        return self.inside.epoch_end(epoch, model)

    def mend(self, session: Session) -> None:
        """Forget epochs that the state does not know; the last one is asked anew, a kill may have cut its answer."""
        self._forget(session.epoch)
        if session.batch == 0 and session.epoch > 0 and session.replica is None:
            self.epoch_end(session.epoch - 1, session.eval_model())

    def _forget(self, epoch: int) -> None:
        """Lines of this epoch and later ones, and a line that was cut off."""
        if not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8")
        kept = [line for line in text.split("\n")[:-1] if json.loads(line)["epoch"] < epoch]
        if (wanted := "".join(f"{line}\n" for line in kept)) != text:
            atomic_write_text(self.file, wanted)
