"""The alarm: single-step training may learn to fool its own attack, and to lose all robustness within an epoch.

Catastrophic overfitting (Wong et al. 2020, arXiv:2001.03994; Andriushchenko & Flammarion 2020, arXiv:2007.02617)
shows as accuracy under one step (FGSM) far above accuracy under several (PGD), here on a few fixed images that the
model is not trained on, in the ball that training has reached: in the final one, any model still on its way there would
seem to have collapsed. What follows is the recipe's: report, stop, or roll back to the last calm state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, Overfitted
from vitruvius.attacks.base import Threat, disturb
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.training._selection import choosing_loader
from vitruvius.training._session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Accuracy under one step and under several."""

    single: float
    multi: float

    def row(self) -> dict[str, float]:
        return {"single_step_accuracy": self.single, "multi_step_accuracy": self.multi}


class Alarm:
    """Two attacks and some images; `read` looks at the session's model."""

    def __init__(self, session: Session, action: str, x: Tensor, y: Tensor, ids: Tensor) -> None:
        train = session.config.train
        self.session = session
        self.action = action
        self.gap = train.alarm_gap
        self.steps = train.alarm_steps
        self.x, self.y, self.ids = x, y, ids

    @classmethod
    def of(cls, session: Session) -> Alarm | None:
        """The alarm a recipe asks for; none for tasks without a threat."""
        train = session.config.train
        threatened = session.task.threat is not None
        action = ("report" if threatened else "none") if train.alarm == "auto" else train.alarm
        if action == "none":
            return None
        if not threatened:
            raise ConfigError(f"train.alarm = {action}, but the task trains against no attack. Leave it out.")
        loader = choosing_loader(session, train.alarm_images, whole=True)
        x, y, ids = (torch.cat(column)[: train.alarm_images] for column in zip(*loader.with_ids(), strict=True))
        return cls(session, action, x, y, ids)

    def read(self) -> Reading:
        """The same numbers on every process."""
        model = self.session.eval_model()
        training = model.training
        model.eval()
        try:
            scores = [self._accuracy(model, threat) for threat in self._threats()]
        finally:
            model.train(training)
        return Reading(*self.session.process.broadcast(scores))

    def _threats(self) -> tuple[Threat, Threat]:
        """One step and several, with the radius of this moment."""
        task = self.session.task
        norm, _ = task.threat or ("linf", 0.0)
        single = FGSM(eps=task.radius, norm=norm)  # type: ignore[arg-type]
        return single, PGD(eps=task.radius, norm=norm, steps=self.steps, best=True)  # type: ignore[arg-type]

    def rings(self, reading: Reading) -> bool:
        """Whether this is a collapse."""
        return reading.single - reading.multi > self.gap

    def message(self, reading: Reading, *, more: str) -> str:
        session = self.session
        return (
            f"catastrophic overfitting at update {session.updates} (epoch {session.epoch + 1}): accuracy is "
            f"{100 * reading.single:.1f} % under one step, {100 * reading.multi:.1f} % under "
            f"{self.steps} steps of the same size of attack. {more}"
        )

    def stop(self, reading: Reading, why: str = "") -> Overfitted:
        """The error that ends a run."""
        advice = "Use a multi-step inner attack, a smaller step or eps, or train.alarm=rollback."
        return Overfitted(self.message(reading, more=why or advice))

    def _accuracy(self, model: torch.nn.Module, threat: Threat) -> float:
        right = 0
        size = self.session.config.data.eval_batch_size or self.session.config.data.batch_size
        for x, y, ids in zip(self.x.split(size), self.y.split(size), self.ids.split(size), strict=True):
            with self.session.autocast():
                moved = disturb(threat, model, x, y, ids)
                with torch.no_grad():
                    right += int((model(moved).argmax(-1) == y).sum())
        return right / len(self.y)
