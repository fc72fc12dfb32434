"""The table of a sweep: one line a run, best first, as CSV and markdown."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, replace
from typing import Any

from vitruvius._files import StrPath, atomic_write_text, join


@dataclass(frozen=True)
class Row:
    """A run as it stands: what was varied, and its metrics so far."""

    name: str
    settings: dict[str, Any]
    status: str
    metrics: list[dict[str, Any]]
    score: float | None = None
    epoch: int | None = None

    def scored(self, best: tuple[float, int] | None) -> Row:
        """With the best value of the metric and the epoch (from 1) that reached it."""
        return self if best is None else replace(self, score=best[0], epoch=best[1] + 1)


def best_of(metrics: list[dict[str, Any]], metric: str, order: str) -> tuple[float, int] | None:
    """The best value of a metric and its epoch. `accuracy` means that of the weights or of their running average."""
    keys = (metric, f"val_{metric}", f"ema_{metric}")
    values = [(float(row[key]), int(row["epoch"])) for row in metrics for key in keys if row.get(key) is not None]
    if not values:
        return None
    chosen = (max if order == "max" else min)(value for value, _ in values)
    return chosen, next(epoch for value, epoch in values if value == chosen)


def write_tables(folder: StrPath, rows: list[Row], metric: str) -> None:
    """summary.csv and summary.md."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(rows, metric))
    atomic_write_text(join(folder, "summary.csv"), text.getvalue())
    atomic_write_text(join(folder, "summary.md"), markdown(rows, metric) + "\n")


def markdown(rows: list[Row], metric: str) -> str:
    """The table, its columns aligned."""
    cells = [[text.replace("|", "\\|") for text in line] for line in _cells(rows, metric)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(rows: list[Row], metric: str) -> list[list[str]]:
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    head = [*keys, metric, "epoch", "epochs", "train_loss", "hours", "status"]
    return [head, *(_line(row, keys) for row in rows)]


def _line(row: Row, keys: list[str]) -> list[str]:
    last = row.metrics[-1] if row.metrics else {}
    hours = sum(float(one.get("seconds", 0.0)) for one in row.metrics) / 3600
    return [
        *(_text(row.settings[key]) if key in row.settings else "" for key in keys),
        "" if row.score is None else f"{row.score:.4f}",
        "" if row.epoch is None else str(row.epoch),
        str(len(row.metrics)),
        f"{last['train_loss']:.4f}" if "train_loss" in last else "",
        f"{hours:.2f}",
        row.status,
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
