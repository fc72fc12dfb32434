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

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, Overfitted
from vitruvius.data.loader import BatchWithIds
from vitruvius.training.checkpoint import Checkpoint
from vitruvius.training.selection import Selection, attack_in_turn, enough_images, one_and_several
from vitruvius.training.session import Session, selection_loader

logger = logging.getLogger(__name__)

MOST = 128  # images, unless a recipe says how many; what they decide: docs/training.md


class RolledBack(Exception):
    """The session stands at an earlier state; its epoch must be entered again."""


@dataclass
class Alarm:
    """Some images; `check` looks how the session's model stands on them and does what the recipe says."""

    session: Session
    action: str
    images: list[BatchWithIds]
    checkpoint: Checkpoint | None = None  # where states without an alarm are
    selection: Selection | None = None  # which may have attacked the same images

    @classmethod
    def of(cls, session: Session, checkpoint: Checkpoint, selection: Selection) -> Alarm | None:
        """The alarm a recipe asks for; none for tasks without a threat."""
        train = session.config.train
        threat = session.task.threat
        action = ("none" if threat is None else "report") if train.alarm == "auto" else train.alarm
        if action == "none":
            return None
        if threat is None:
            raise ConfigError(f"train.alarm = {action}, but the task trains against no attack. Leave it out.")
        number = train.alarm_images or min(MOST, enough_images(session, one_and_several(*threat, train.alarm_steps)))
        return cls(session, action, [*selection_loader(session, number, whole=True).with_ids()], checkpoint, selection)

    def check(self) -> dict[str, float]:
        """Read, and do what the recipe says; the numbers for the row. A calm state is kept for a rollback."""
        self.session.agree_on_statistics()
        single, multi = self.read()
        if single - multi > self.session.config.train.alarm_gap:
            self._ring(single, multi)
        elif self.action == "rollback" and self.checkpoint is not None:
            self.checkpoint.save_calm()
        return {"single_step_accuracy": single, "multi_step_accuracy": multi}

    def read(self) -> tuple[float, float]:
        """Accuracy under one step, and under that and several, with the radius of this moment; on all processes alike.

        What has just chosen the best weights is not attacked again.
        """
        session, ids = self.session, torch.cat([ids for _, _, ids in self.images])
        norm, _ = session.task.threat or ("linf", 0.0)
        threats = one_and_several(norm, session.task.radius, session.config.train.alarm_steps)
        after = None if self.selection is None else self.selection.stood(threats, ids)
        if after is None:
            model = session.eval_model()
            with in_eval_mode(model), session.autocast():
                _, after = attack_in_turn(model, threats, self.images)
        single, multi = session.process.broadcast(after.double().mean(1).tolist())
        return single, multi

    def _ring(self, single: float, multi: float) -> None:
        session, train = self.session, self.session.config.train
        session.alarms += 1
        message = (
            f"catastrophic overfitting at update {session.updates} (epoch {session.epoch + 1}): accuracy is "
            f"{100 * single:.1f} % under one step, {100 * multi:.1f} % under "
            f"{train.alarm_steps} steps of the same size of attack."
        )
        if self.action == "report":
            if session.process.first:
                logger.warning("%s Training continues (train.alarm=report).", message)
            return
        if self.action == "rollback" and session.rollbacks >= train.alarm_rollbacks:
            raise Overfitted(f"{message} {session.rollbacks} rollback(s) have not helped.")
        alarms, rollbacks = session.alarms, session.rollbacks + 1
        if self.action != "rollback" or self.checkpoint is None or not self.checkpoint.load_calm():
            advice = "Use a multi-step inner attack, a smaller step or eps, or train.alarm=rollback."
            raise Overfitted(f"{message} {advice}")
        if self.selection is not None:
            self.selection.last = (-1, (), {})  # updates come again
        if session.process.first:
            logger.warning("%s Back to update %d, with %g of the rate.", message, session.updates, train.alarm_lr)
        change = train.alarm_lr ** (rollbacks - session.rollbacks)
        for group in session.optimizer.param_groups:  # timm's schedules multiply by lr_scale
            group["lr_scale"] = group.get("lr_scale", 1.0) * change
            group["lr"] *= change
        session.alarms, session.rollbacks = alarms, rollbacks
        self.checkpoint.save()
        raise RolledBack
