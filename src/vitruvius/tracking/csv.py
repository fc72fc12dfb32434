"""Metrics as a table that every spreadsheet reads: metrics.csv, written again after every epoch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._files import atomic_write_text
from vitruvius.tracking.base import Row, trackers


@trackers.register("csv")
class CSV:
    """metrics.csv in the run folder: one line per epoch, one column per number."""

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        self.file = folder / "metrics.csv"

    def log(self, rows: Sequence[Row]) -> None:
        text = io.StringIO()
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        if columns:
            atomic_write_text(self.file, text.getvalue())

    def close(self) -> None:
        pass
