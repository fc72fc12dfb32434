"""Objectives, as timm training tasks: one file each, `task(x, y) → {"loss", "output", …}`."""

from vitruvius.tasks._adversarial import AdversarialObjective
from vitruvius.tasks._base import BatchDraws, Objective, Penalties, tasks
from vitruvius.tasks._losses import Criterion, accuracy, divergence
from vitruvius.tasks._passes import batch_norm_frozen, evaluating
from vitruvius.tasks._schedules import Schedule, make_schedule, schedules

__all__ = [
    "AdversarialObjective",
    "BatchDraws",
    "Criterion",
    "Objective",
    "Penalties",
    "Schedule",
    "accuracy",
    "batch_norm_frozen",
    "divergence",
    "evaluating",
    "make_schedule",
    "schedules",
    "tasks",
]
