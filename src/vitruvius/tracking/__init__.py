"""Where metrics go besides metrics.jsonl: one file per tracker, named under `tracking:` in a recipe."""

from vitruvius.tracking.base import Tracker, trackers

__all__ = ["Tracker", "trackers"]
