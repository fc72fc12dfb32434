"""Honest selection: the best weights are those that do best on images kept from training, under attack if need be.

The attack has several steps and is never the one that trains (Rice et al. 2020, arXiv:2002.11569: robustness is
overfitted long before training ends); the test set has no say unless the recipe holds nothing out.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._progress import Progress, no_progress
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import Report, describe, evaluate, make_threat
from vitruvius.evaluation.threats import Threat
from vitruvius.training.session import Session, selection_loader

logger = logging.getLogger(__name__)

STEPS = 10


class Selection:
    """What chooses the best weights: some images, and a threat or none."""

    def __init__(self, session: Session) -> None:
        train, threat = session.config.train, session.task.threat
        self.session = session
        self.threat: Threat | None = None
        self.attacked = session.val_loader
        self.last: tuple[int, Report] | None = None  # update and report of the weights judged last
        if train.select == "clean" or (train.select == "auto" and threat is None):
            if train.select_threat:
                raise ConfigError(
                    "train.select_threat is set, but accuracy on clean images chooses; set train.select=robust."
                )
            return
        self.threat = selection_threat(train.select_threat, threat)
        if train.select_images is not None:
            self.attacked = selection_loader(session, train.select_images)
        if not train.holdout:
            logger.warning(
                "train.holdout = 0: the best weights are chosen on data.val_split=%s. If that is the test set, its "
                "accuracy will flatter; hold out a part of the training set with train.holdout=0.1.",
                session.config.data.val_split,
            )

    @property
    def key(self) -> str:
        """The number that chooses, without `val_` or `ema_`."""
        return "accuracy" if self.threat is None else "robust_accuracy"

    def judge(self, progress: Progress = no_progress) -> dict[str, float]:
        """Accuracy on the images that choose, of the weights and of their running average.

        progress: called after every batch; by default nobody is.
        """
        numbers = {f"val_{key}": value for key, value in self._judge(progress, ema=False).items()}
        if self.session.task.has_ema():
            numbers |= {f"ema_{key}": value for key, value in self._judge(progress, ema=True).items()}
        return numbers

    def _judge(self, progress: Progress, *, ema: bool) -> dict[str, float]:
        session = self.session
        model = session.eval_model(ema=ema).eval()
        together = self.threat is not None and self.attacked is session.val_loader
        with session.autocast():
            threats = [self.threat] if self.threat is not None and together else []
            report = evaluate(model, session.val_loader, threats, process=session.process, progress=progress)
            numbers = {"accuracy": report["clean"].accuracy, "loss": float(report["clean"].loss or 0.0)}
            if self.threat is None:
                return numbers
            if not together:
                report = evaluate(model, self.attacked, [self.threat], process=session.process, progress=progress)
            numbers["robust_accuracy"] = report[describe(self.threat)].accuracy
        if not ema:
            self.last = session.updates, report
        return numbers

    def correct(self, threat: Threat, ids: Tensor) -> Tensor | None:
        """(N,) whether each of these images was classified correctly under a threat, if it chose at this update."""
        if threat != self.threat or self.last is None or self.last[0] != self.session.updates:
            return None
        ledger, name = self.last[1].ledger, describe(threat)
        return None if ledger.lacks(name, ids).any() else ledger.find(name, ids)["correct"]

    def metric(self, row: dict[str, Any]) -> float | None:
        """What a plateau schedule follows."""
        return row.get(f"val_{self.key}")

    def choose(self, row: dict[str, Any]) -> None:
        """Note these weights if they are the best so far."""
        session = self.session
        score, of_average = row.get(f"val_{self.key}"), row.get(f"ema_{self.key}")
        is_ema = of_average is not None and (score is None or of_average >= score)
        if is_ema:
            score = of_average
        if score is not None and score > session.best:
            session.best, session.best_epoch, session.best_is_ema = score, row["epoch"], is_ema


def selection_threat(spec: str | None, ball: tuple[str, float] | None) -> Threat:
    """The threat that a recipe names, which must make several steps; else PGD in the task's ball."""
    if spec:
        threat = make_threat(spec)
        if isinstance(threat, FGSM) or getattr(threat, "steps", 2) < 2:
            raise ConfigError(f"train.select_threat = {spec}: one step flatters models trained on one; use several.")
        return threat
    if ball is None:
        raise ConfigError(
            "train.select = robust, but the task trains against no attack; name one that chooses, "
            "e.g. train.select_threat=pgd:eps=4/255,steps=10,best=true."
        )
    norm, eps = ball
    return PGD(eps=eps, norm=norm, steps=STEPS, best=True)  # type: ignore[arg-type]
