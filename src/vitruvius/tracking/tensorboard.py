"""Metrics for TensorBoard: an event file in the run folder; `tensorboard --logdir runs` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._registry import require
from vitruvius.tracking.base import Row, scalars, trackers


@trackers.register("tensorboard")
class TensorBoard:
    """Scalars by epoch in <run>/tensorboard; a resumed run writes its file again, so that no row is there twice."""

    def __init__(self) -> None:
        require("tensorboard", "tensorboard")
        self.writer: Any = None
        self.written: list[Row] = []

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder / "tensorboard"

    def log(self, rows: Sequence[Row]) -> None:
        """Add what is new among all `rows` so far; if rows were taken back, start the file again."""
        if self.writer is None or self.written != list(rows[: len(self.written)]):
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            for old in self.folder.glob("events.out.tfevents.*"):
                old.unlink()
            self.written, self.writer = [], SummaryWriter(str(self.folder))
        for row in rows[len(self.written) :]:
            for name, value in scalars(row).items():
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()
        self.written = list(rows)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
