"""The table of a sweep: one line per run, best first, as CSV and markdown."""

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
    best: tuple[float, int] | None = None
    for row in metrics:
        for key in (metric, f"val_{metric}", f"ema_{metric}"):
            value = row.get(key)
            if value is not None and (best is None or _is_better(float(value), best[0], order)):
                best = (float(value), int(row["epoch"]))
    return best


def sorted_by_score(rows: list[Row], order: str) -> list[Row]:
    """Best first; runs without a score last, in their own order."""
    scored = [row for row in rows if row.score is not None]
    scored.sort(key=lambda row: row.score or 0.0, reverse=order == "max")
    return [*scored, *(row for row in rows if row.score is None)]


def _is_better(value: float, than: float, order: str) -> bool:
    if order == "max":
        return value > than
    return value < than


def write_tables(folder: StrPath, rows: list[Row], metric: str) -> None:
    """summary.csv and summary.md."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(rows, metric))
    atomic_write_text(join(folder, "summary.csv"), text.getvalue())
    atomic_write_text(join(folder, "summary.md"), markdown(rows, metric) + "\n")


def markdown(rows: list[Row], metric: str) -> str:
    """The table, its columns aligned."""
    cells = [[text.replace("|", "\\|") for text in line] for line in _cells(rows, metric)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_markdown_line(line, widths) for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _markdown_line(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)) + " |"


def _cells(rows: list[Row], metric: str) -> list[list[str]]:
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    head = [*keys, metric, "epoch", "epochs", "train_loss", "hours", "status"]
    return [head, *(_line(row, keys) for row in rows)]


def _line(row: Row, keys: list[str]) -> list[str]:
    hours = sum(float(one.get("seconds", 0.0)) for one in row.metrics) / 3600
    settings = [plain_text(row.settings[key]) if key in row.settings else "" for key in keys]
    return [*settings, *_score(row), str(len(row.metrics)), _last_loss(row), f"{hours:.2f}", row.status]


def _score(row: Row) -> list[str]:
    """The best value and its epoch; empty cells where there is none."""
    if row.score is None:
        return ["", ""]
    return [f"{row.score:.4f}", str(row.epoch)]


def _last_loss(row: Row) -> str:
    if not row.metrics or "train_loss" not in row.metrics[-1]:
        return ""
    return f"{row.metrics[-1]['train_loss']:.4f}"


def plain_text(value: Any) -> str:
    """A setting as one writes it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value)
