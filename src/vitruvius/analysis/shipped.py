"""The curves the reproduction study ships (arXiv:2505.07908): CSV files with the columns Step, value, MIN, MAX.

One row is one epoch. Step advances by 15 per epoch and by 17 after a resumption, so it does not tell the epoch.
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
    """Read one exported curve; cells that are empty or not finite are left out, their epoch stays counted.

    `path` is the CSV file, local or on a remote file system.
    """
    rows = list(csv.reader(io.StringIO(read_text(path).lstrip("\ufeff"))))
    name, place = _value_column(rows, path)
    epochs = []
    values = []
    for epoch, row in enumerate(rows[1:]):
        if not row:
            continue
        value = _number(row, place, path)
        if value is not None:
            epochs.append(epoch)
            values.append(value)
    return ShippedCurve(name=name, epochs=epochs, values=values)


def _value_column(rows: list[list[str]], path: StrPath) -> tuple[str, int]:
    """Name and place of the one column that is neither the step nor an extreme."""
    head: list[str] = []
    if rows:
        head = rows[0]
    named = [name for name in head[1:] if not name.endswith(("__MIN", "__MAX"))]
    if head[:1] != ["Step"] or len(named) != 1:
        raise DataError(f"{path} has the columns {head}; expected Step, one value, and its __MIN and __MAX.")
    return named[0], head.index(named[0])


def _number(row: list[str], place: int, path: StrPath) -> float | None:
    text = ""
    if place < len(row):
        text = row[place]
    try:
        if text:
            value = float(text)
        else:
            value = math.nan
    except ValueError:
        raise DataError(f"{path} holds {text!r} where a number was expected.") from None
    if math.isfinite(value):
        return value
    return None
