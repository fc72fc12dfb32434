"""Metrics as a table that every spreadsheet reads: metrics.csv, written again after every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._notebook import to_csv
from vitruvius.tracking.base import Row, trackers


@trackers.register("csv")
class CSV:
    """metrics.csv in the run folder: one line per epoch, one column per number."""

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        self.file = folder / "metrics.csv"

    def log(self, rows: Sequence[Row]) -> None:
        if rows:
            to_csv(rows, self.file)

    def close(self) -> None:
        pass
