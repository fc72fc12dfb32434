"""Objectives, as timm training tasks: one file each, `task(x, y) → {"loss", "output", …}`."""

from vitruvius._registry import load_room
from vitruvius.tasks._adversarial import AdversarialObjective
from vitruvius.tasks._base import Objective, Penalties, tasks
from vitruvius.tasks._losses import Criterion, accuracy, divergence
from vitruvius.tasks._modes import evaluating, resting
from vitruvius.tasks._schedules import Schedule, make_schedule, schedules

__all__ = [
    "AdversarialObjective",
    "Criterion",
    "Objective",
    "Penalties",
    "Schedule",
    "accuracy",
    "divergence",
    "evaluating",
    "make_schedule",
    "resting",
    "schedules",
    "tasks",
]

load_room(__name__, __path__)
