"""The curves the reproduction study ships (arXiv:2505.07908): CSV files with the columns Step, value, MIN, MAX.

One row is one epoch. Step advances by 15 an epoch and by 17 after a resumption, so it does not tell the epoch.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass

from vitruvius._errors import DataError
from vitruvius._files import StrPath, read_text


@dataclass(frozen=True, kw_only=True)
class ShippedCurve:
    """One exported curve; `epochs` counts rows from 0."""

    name: str
    epochs: list[int]
    values: list[float]


def read_shipped(path: StrPath) -> ShippedCurve:
    """Read one exported curve; cells that are empty or not finite are left out, their epoch stays counted."""
    rows = list(csv.reader(io.StringIO(read_text(path).lstrip("\ufeff"))))
    head = rows[0] if rows else []
    named = [name for name in head[1:] if not name.endswith(("__MIN", "__MAX"))]
    if not head or head[0] != "Step" or len(named) != 1:
        raise DataError(f"{path} has the columns {head}; expected Step, one value, and its __MIN and __MAX.")
    place = head.index(named[0])
    cells = [(epoch, _number(row, place, path)) for epoch, row in enumerate(rows[1:]) if row]
    kept = [(epoch, value) for epoch, value in cells if value is not None]
    return ShippedCurve(name=named[0], epochs=[epoch for epoch, _ in kept], values=[value for _, value in kept])


def _number(row: list[str], place: int, path: StrPath) -> float | None:
    text = row[place] if place < len(row) else ""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise DataError(f"{path} holds {text!r} where a number was expected.") from None
    return value if math.isfinite(value) else None
