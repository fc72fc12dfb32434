"""Where metrics go besides metrics.jsonl: one file per tracker, named under `tracking:` in a recipe."""

from vitruvius.tracking._base import Row, Tracker, Trackers, trackers

__all__ = ["Row", "Tracker", "Trackers", "trackers"]
