"""Honest selection: the best weights are those that do best on images kept from training, under attack if need be.

The attack has several steps and is never the one that trains (Rice et al. 2020, arXiv:2002.11569: robustness is
overfitted long before training ends); the test set has no say unless the recipe holds nothing out.    N images
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._progress import Progress, no_progress
from vitruvius.attacks.base import cost_of, disturb
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.data.loader import BatchWithIds
from vitruvius.evaluation import evaluate, make_threat
from vitruvius.evaluation.threats import Threat
from vitruvius.training.session import Session, selection_loader

logger = logging.getLogger(__name__)

STEPS = 10
SHARE, FEWEST = 0.1, 64  # of an epoch's passes, and images; what they decide: docs/training.md


class Selection:
    """What chooses the best weights: some images, and threats that attack them in turn, or none."""

    def __init__(self, session: Session) -> None:
        train, ball = session.config.train, session.task.threat
        self.session = session
        self.threats: Sequence[Threat] = ()
        # the update of the weights judged last, what attacked them, and whether an image stood after each threat, by id
        self.last: tuple[int, Sequence[Threat], dict[int, Tensor]] = (-1, (), {})
        if train.select == "clean" or (train.select == "auto" and ball is None):
            if train.select_threat:
                raise ConfigError(
                    "train.select_threat is set, but accuracy on clean images chooses; set train.select=robust."
                )
            return
        self.threats = selection_threats(train.select_threat, ball)
        self.attacked = selection_loader(session, train.select_images or enough_images(session, self.threats))
        if not train.holdout:
            logger.warning(
                "train.holdout = 0: the best weights are chosen on data.val_split=%s. If that is the test set, its "
                "accuracy will flatter; hold out a part of the training set with train.holdout=0.1.",
                session.config.data.val_split,
            )

    @property
    def key(self) -> str:
        """The number that chooses, without `val_` or `ema_`."""
        return "robust_accuracy" if self.threats else "accuracy"

    def judge(self, progress: Progress = no_progress, *, attacking: bool = True) -> dict[str, float]:
        """Accuracy on the images that choose, of the weights and of their running average."""
        session, numbers = self.session, dict[str, float]()
        for name in ("val", "ema") if session.task.has_ema() else ("val",):
            model = session.eval_model(ema=name == "ema").eval()
            with session.autocast():
                clean = evaluate(model, session.val_loader, process=session.process, progress=progress)["clean"]
                numbers |= {f"{name}_accuracy": clean.accuracy, f"{name}_loss": float(clean.loss or 0.0)}
                if self.threats and attacking:
                    own = attack_in_turn(model, self.threats, self.attacked.with_ids(), progress)
                    ids, after = (torch.cat(parts, -1) for parts in zip(*session.process.gather(own), strict=True))
                    numbers[f"{name}_robust_accuracy"] = float(after[-1].double().mean())
                    if name == "val":
                        self.last = session.updates, self.threats, dict(zip(ids.tolist(), after.T, strict=True))
        return numbers

    def stood(self, threats: Sequence[Threat], ids: Tensor) -> Tensor | None:
        """(T, N) which of these images stood after each of these threats, if they chose at this update."""
        update, made, after = self.last
        if (update, made) != (self.session.updates, threats) or not after.keys() >= set(ids.tolist()):
            return None
        return torch.stack([after[image] for image in ids.tolist()], 1)

    def choose(self, row: dict[str, Any]) -> None:
        """Note these weights if they are the best so far; of two that stand alike under attack, the later."""
        session = self.session
        score, of_average = row.get(f"val_{self.key}"), row.get(f"ema_{self.key}")
        is_ema = of_average is not None and (score is None or of_average >= score)
        if is_ema:
            score = of_average
        if score is not None and (score > session.best or (self.threats and score == session.best)):
            session.best, session.best_epoch, session.best_is_ema = score, row["epoch"], is_ema


def selection_threats(spec: str | None, ball: tuple[str, float] | None) -> Sequence[Threat]:
    """The threat that a recipe names, which must make several steps; else one step and PGD in the task's ball."""
    if spec:
        threat = make_threat(spec)
        if isinstance(threat, FGSM) or getattr(threat, "steps", 2) < 2:
            raise ConfigError(f"train.select_threat = {spec}: one step flatters models trained on one; use several.")
        return (threat,)
    if ball is None:
        advice = "name one that chooses, e.g. train.select_threat=pgd:eps=4/255,steps=10,best=true."
        raise ConfigError(f"train.select = robust, but the task trains against no attack; {advice}")
    return one_and_several(*ball, STEPS)


def one_and_several(norm: str, eps: float, steps: int) -> Sequence[Threat]:
    """One step, and several for what that leaves: what it has broken needs no more, and what collapses shows."""
    return FGSM(eps=eps, norm=norm), PGD(eps=eps, norm=norm, steps=steps, best=True)  # type: ignore[arg-type]


def enough_images(session: Session, threats: Sequence[Threat]) -> int:
    """How many images are attacked where a recipe does not say."""
    trained = session.task.passes_per_image * session.train_loader.num_images
    judged = (1 + session.task.has_ema()) * sum(cost_of(threat).total for threat in threats)
    return max(FEWEST, int(SHARE * trained / judged))


def attack_in_turn(
    model: nn.Module, threats: Sequence[Threat], batches: Iterable[BatchWithIds], progress: Progress = no_progress
) -> tuple[Tensor, Tensor]:
    """The ids (N,) of some images, and which of them stand after each threat, (T, N); each attacks what is left."""
    numbers, stood = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(len(threats), 0, dtype=torch.bool)]
    for x, y, ids in batches:
        after, left = torch.zeros(len(threats), len(y), dtype=torch.bool), torch.arange(len(y))
        for place, threat in enumerate(threats):
            rows = left.to(x.device)
            if len(rows):
                moved = disturb(threat, model, x[rows], y[rows], ids[left], progress)
                with torch.no_grad():
                    left = left[(model(moved).argmax(-1) == y[rows]).cpu()]
            after[place, left] = True
        numbers.append(ids)
        stood.append(after)
    return torch.cat(numbers), torch.cat(stood, -1)
