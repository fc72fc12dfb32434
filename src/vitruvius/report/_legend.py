"""Legends: runs by colour, metrics by line."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.report._blocks import Key
from vitruvius.report._runs import Run


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """A dot for each run; a single run needs no legend."""
    return [Key(text=run.name, colour=run.look.name) for run in runs] if len(runs) > 1 else []
