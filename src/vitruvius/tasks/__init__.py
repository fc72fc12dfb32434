"""Objectives, as timm training tasks: one file each, `task(x, y) → {"loss", "output", …}`."""

from vitruvius._registry import load_room
from vitruvius.tasks._base import Penalties, tasks

__all__ = ["Penalties", "tasks"]

load_room(__name__, __path__)
