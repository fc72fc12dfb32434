"""The alarm: single-step training may learn to fool its own attack, and to lose all robustness within an epoch.

Catastrophic overfitting (Wong et al. 2020, arXiv:2001.03994; Andriushchenko & Flammarion 2020, arXiv:2007.02617)
shows as accuracy under one step (FGSM) far above accuracy under several (PGD), here on a few fixed images that the
model is not trained on, in the ball that training has reached: in the final one, any model still on its way there would
seem to have collapsed. What follows is the recipe's: report, stop, or roll back to the last state without an alarm.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, Overfitted
from vitruvius.attacks.base import Threat, disturb
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.training.checkpoint import Checkpoint
from vitruvius.training.selection import Selection
from vitruvius.training.session import Session, selection_loader

logger = logging.getLogger(__name__)


class RolledBack(Exception):
    """The session stands at an earlier state; its epoch must be entered again."""


@dataclass(frozen=True)
class Reading:
    """Accuracy under one step and under several."""

    single: float
    multi: float


@dataclass
class Alarm:
    """Two attacks and some images; `check` looks at the session's model and does what the recipe says."""

    session: Session
    action: str
    images: tuple[Tensor, Tensor, Tensor]  # with labels and ids
    checkpoint: Checkpoint | None = None  # where states without an alarm are
    selection: Selection | None = None  # which may have attacked the same images

    @classmethod
    def of(cls, session: Session, checkpoint: Checkpoint, selection: Selection) -> Alarm | None:
        """The alarm a recipe asks for; none for tasks without a threat."""
        train = session.config.train
        threatened = session.task.threat is not None
        action = ("report" if threatened else "none") if train.alarm == "auto" else train.alarm
        if action == "none":
            return None
        if not threatened:
            raise ConfigError(f"train.alarm = {action}, but the task trains against no attack. Leave it out.")
        loader = selection_loader(session, train.alarm_images, whole=True)
        x, y, ids = (torch.cat(column)[: train.alarm_images] for column in zip(*loader.with_ids(), strict=True))
        return cls(session, action, (x, y, ids), checkpoint, selection)

    def check(self) -> dict[str, float]:
        """Read, and do what the recipe says; the numbers for the row.

        A state without an alarm is kept for a rollback.
        """
        self.session.agree_on_statistics()
        reading = self.read()
        if self.rings(reading):
            self._ring(reading)
        elif self.action == "rollback" and self.checkpoint is not None:
            self.checkpoint.save_calm()
        return {"single_step_accuracy": reading.single, "multi_step_accuracy": reading.multi}

    def read(self) -> Reading:
        """Accuracy under one step and several with the radius of this moment, the same on every process.

        Several steps are not made again where they have just chosen the best weights.
        """
        task = self.session.task
        norm, _ = task.threat or ("linf", 0.0)
        single = FGSM(eps=task.radius, norm=norm)  # type: ignore[arg-type]
        steps = self.session.config.train.alarm_steps
        multi = PGD(eps=task.radius, norm=norm, steps=steps, best=True)  # type: ignore[arg-type]
        known = None if self.selection is None else self.selection.correct(multi, self.images[2])
        model = self.session.eval_model()
        with in_eval_mode(model):
            scores = [self._accuracy(model, single)]
            scores.append(self._accuracy(model, multi) if known is None else int(known.sum()) / len(known))
        return Reading(*self.session.process.broadcast(scores))

    def _accuracy(self, model: torch.nn.Module, threat: Threat) -> float:
        right = 0
        size = self.session.config.data.eval_batch_size or self.session.config.data.batch_size
        for x, y, ids in zip(*(column.split(size) for column in self.images), strict=True):
            with self.session.autocast():
                moved = disturb(threat, model, x, y, ids)
                with torch.no_grad():
                    right += int((model(moved).argmax(-1) == y).sum())
        return right / len(self.images[0])

    def rings(self, reading: Reading) -> bool:
        """Whether this is a collapse."""
        return reading.single - reading.multi > self.session.config.train.alarm_gap

    def _ring(self, reading: Reading) -> None:
        session, train = self.session, self.session.config.train
        session.alarms += 1
        message = (
            f"catastrophic overfitting at update {session.updates} (epoch {session.epoch + 1}): accuracy is "
            f"{100 * reading.single:.1f} % under one step, {100 * reading.multi:.1f} % under "
            f"{train.alarm_steps} steps of the same size of attack."
        )
        if self.action == "report":
            if session.process.first:
                logger.warning("%s Training continues (train.alarm=report).", message)
            return
        advice = "Use a multi-step inner attack, a smaller step or eps, or train.alarm=rollback."
        if self.action != "rollback" or self.checkpoint is None:
            raise Overfitted(f"{message} {advice}")
        if session.rollbacks >= train.alarm_rollbacks:
            raise Overfitted(f"{message} {session.rollbacks} rollback(s) have not helped.")
        self._roll_back(self.checkpoint, message, advice)

    def _roll_back(self, checkpoint: Checkpoint, message: str, advice: str) -> None:
        session, factor = self.session, self.session.config.train.alarm_lr
        alarms, rollbacks = session.alarms, session.rollbacks + 1
        if not checkpoint.load_calm():
            raise Overfitted(f"{message} {advice}")
        if session.process.first:
            logger.warning("%s Back to update %d, with %g of the rate.", message, session.updates, factor)
        for group in session.optimizer.param_groups:  # timm's schedules multiply by lr_scale
            change = factor ** (rollbacks - session.rollbacks)
            group["lr_scale"] = group.get("lr_scale", 1.0) * change
            group["lr"] *= change
        session.alarms, session.rollbacks = alarms, rollbacks
        checkpoint.save()
        raise RolledBack
