"""Honest selection: the best weights are those that do best on images kept from training, under attack if need be.

The attack has several steps and is never the one that trains (Rice et al. 2020, arXiv:2002.11569: robustness is
overfitted long before training ends); the test set has no say unless the recipe holds nothing out.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from vitruvius._errors import ConfigError
from vitruvius._progress import Progress, no_progress
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.data import Loader, eval_loader, held_out
from vitruvius.evaluation import describe, evaluate, make_threat
from vitruvius.evaluation.threats import Threat
from vitruvius.training._build import preprocessing
from vitruvius.training._session import Session

logger = logging.getLogger(__name__)

STEPS = 10


class Selection:
    """Who chooses: some loaders, and a threat or none."""

    def __init__(self, session: Session) -> None:
        train = session.config.train
        threat = session.task.threat
        self.session = session
        self.threat: Threat | None = None
        self.attacked = session.val_loader
        if train.select == "clean" or (train.select == "auto" and threat is None):
            if train.select_threat:
                raise ConfigError(
                    "train.select_threat is set, but accuracy on clean images chooses; set train.select=robust."
                )
            return
        self.threat = _threat(train.select_threat, threat)
        if train.select_images is not None:
            self.attacked = choosing_loader(session, train.select_images)
        if not train.holdout:
            logger.warning(
                "train.holdout = 0: the best weights are chosen on data.val_split=%s. If that is the test set, its "
                "accuracy will flatter; hold out a part of the training set with train.holdout=0.1.",
                session.config.data.val_split,
            )

    def look(self, progress: Progress = no_progress) -> dict[str, float]:
        """Accuracy on the images that choose, of the weights and of their running average.

        progress: called after every batch; by default nobody is.
        """
        numbers: dict[str, float] = {}
        for name, ema in (("val", False), ("ema", True)):
            if not ema or self.session.task.has_ema():
                numbers |= {f"{name}_{key}": value for key, value in self._look(ema, progress).items()}
        return numbers

    def choose(self, row: dict[str, Any]) -> None:
        """Note these weights if they are the best so far."""
        session = self.session
        score = row.get(f"val_{self.key}")
        of_average = row.get(f"ema_{self.key}")
        is_ema = of_average is not None and (score is None or of_average >= score)
        if is_ema:
            score = of_average
        if score is not None and score > session.best:
            session.best = score
            session.best_epoch = row["epoch"]
            session.best_is_ema = is_ema

    def metric(self, row: dict[str, Any]) -> float | None:
        """What a plateau schedule watches."""
        value: float | None = row.get(f"val_{self.key}")
        return value

    @property
    def key(self) -> str:
        """The number that chooses, without `val_` or `ema_`."""
        if self.threat is None:
            return "accuracy"
        return "robust_accuracy"

    def _look(self, ema: bool, progress: Progress) -> dict[str, float]:
        session = self.session
        model = session.eval_model(ema=ema).eval()
        threats: list[Threat] = []
        if self.threat is not None and self.attacked is session.val_loader:
            threats = [self.threat]
        with session.autocast():
            report = evaluate(model, session.val_loader, threats, process=session.process, progress=progress)
            numbers = {"accuracy": report["clean"].accuracy, "loss": float(report["clean"].loss or 0.0)}
            if self.threat is None:
                return numbers
            if not threats:  # other images than those of clean accuracy
                report = evaluate(model, self.attacked, [self.threat], process=session.process, progress=progress)
            numbers["robust_accuracy"] = report[describe(self.threat)].accuracy
        return numbers


def choosing_loader(session: Session, images: int | None, *, whole: bool = False) -> Loader:
    """At most this many of the images that choose, a fixed random choice; `whole`: all of them on every process."""
    config = session.config
    process = session.process
    shares: dict[str, Any] = {"input_size": preprocessing(config), "device": process.device}
    if not whole:
        shares |= {"rank": process.rank, "world_size": process.world_size}
    if not config.train.holdout:
        return eval_loader(replace(config.data, val_num_samples=images or config.data.val_num_samples), **shares)
    chosen = held_out(config.data, config.train.holdout, seed=config.seed)
    if images is not None and images < len(chosen):
        generator = torch.Generator().manual_seed(config.seed)
        chosen = chosen[torch.randperm(len(chosen), generator=generator)[:images].sort().values]
    return eval_loader(config.data, split=config.data.train_split, only=chosen, **shares)


def _threat(spec: str | None, ball: tuple[str, float] | None) -> Threat:
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
