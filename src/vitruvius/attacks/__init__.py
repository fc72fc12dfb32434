"""Attacks, the worst case: one file per attack, (model, x, y) → x'."""

from vitruvius._dice import Dice, image_ids
from vitruvius.attacks._base import (
    Attack,
    Ensemble,
    Model,
    Threat,
    Work,
    attacks,
    check_eps,
    check_inputs,
    disturb,
    work_of,
)
from vitruvius.attacks._ensemble.journal import Journal, StageEvent
from vitruvius.attacks._ensemble.result import Outcome, StageResult
from vitruvius.attacks._losses import CE, DLR, KL, LOSSES, MARGIN, Loss, hard_labels
from vitruvius.attacks._models import (
    CheckedModel,
    LossAndGrad,
    SurrogateGradient,
    check_logits,
    frozen,
    full_precision,
    loss_and_grad,
    note_grad,
    unwrapped,
)
from vitruvius.attacks._norms import L1, L2, LINF, NORMS, L1Norm, L2Norm, LinfNorm, Norm, as_norm
from vitruvius.attacks._search.watch import SearchWatch, StepProgress, watched_by, watched_range

__all__ = [
    "CE",
    "DLR",
    "KL",
    "L1",
    "L2",
    "LINF",
    "LOSSES",
    "MARGIN",
    "NORMS",
    "Attack",
    "CheckedModel",
    "Dice",
    "Ensemble",
    "Journal",
    "L1Norm",
    "L2Norm",
    "LinfNorm",
    "Loss",
    "LossAndGrad",
    "Model",
    "Norm",
    "Outcome",
    "SearchWatch",
    "StageEvent",
    "StageResult",
    "StepProgress",
    "SurrogateGradient",
    "Threat",
    "Work",
    "as_norm",
    "attacks",
    "check_eps",
    "check_inputs",
    "check_logits",
    "disturb",
    "frozen",
    "full_precision",
    "hard_labels",
    "image_ids",
    "loss_and_grad",
    "note_grad",
    "unwrapped",
    "watched_by",
    "watched_range",
    "work_of",
]
