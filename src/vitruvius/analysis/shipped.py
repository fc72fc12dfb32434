"""The curves the reproduction study ships (arXiv:2505.07908): CSV files with the columns Step, value, MIN, MAX.

One row is one epoch. Step advances by 15 per epoch and by 17 after a resumption, so it does not tell the epoch.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._files import StrPath, read_text

STATISTICS = {  # theirs → ours, of the analysis `reconstruction`
    "error": "error",
    "h": "h2",
    "varphi": "phi2",
    "rel_error_wrt_h": "relative_to_h",
    "rel_error_wrt_varphi": "relative_to_phi",
}
BATCHES = {"train": "train", "test": "validation"}
NAME = re.compile(rf"(?P<model>.+)_(?P<batch>{'|'.join(BATCHES)})_(?P<statistic>{'|'.join(STATISTICS)})")


@dataclass(frozen=True, kw_only=True)
class ShippedCurve:
    """One exported curve; `epochs` counts rows from 0."""

    name: str
    epochs: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class ShippedRun:
    """The curves of one model of the study, by our names of (statistic, batch)."""

    model: str
    curves: dict[tuple[str, str], ShippedCurve]


def read_shipped(path: StrPath) -> ShippedCurve:
    """Read one exported curve; cells that are empty or not finite are left out, their epoch stays counted."""
    head, *rows = [*csv.reader(io.StringIO(read_text(path).lstrip("\ufeff")))] or [[]]
    named = [name for name in head[1:] if not name.endswith(("__MIN", "__MAX"))]
    if head[:1] != ["Step"] or len(named) != 1:
        raise DataError(f"{path} has the columns {head}; expected Step, one value, and its __MIN and __MAX.")
    column = head.index(named[0])
    epochs = []
    values = []
    for epoch, row in enumerate(rows):
        text = row[column] if column < len(row) else ""
        try:
            value = float(text or "nan")
        except ValueError:
            raise DataError(f"{path} holds {text!r} where a number was expected.") from None
        if math.isfinite(value):
            epochs.append(epoch)
            values.append(value)
    return ShippedCurve(name=named[0], epochs=epochs, values=values)


def read_shipped_folder(folder: str | Path) -> list[ShippedRun]:
    """The curves in a `folder` like the study's wandb_data: deit_train_error.csv, vit_test_rel_error_wrt_h.csv, …"""
    models: dict[str, dict[tuple[str, str], ShippedCurve]] = {}
    for file in sorted(Path(folder).rglob("*.csv")):
        named = NAME.fullmatch(file.stem)
        if named is not None:
            key = (STATISTICS[named["statistic"]], BATCHES[named["batch"]])
            models.setdefault(named["model"], {})[key] = read_shipped(file)
    if not models:
        raise DataError(
            f"{folder} holds no curves of the reproduction study; expected files such as deit_train_error.csv and "
            "deit_test_rel_error_wrt_h.csv, as in its folder scripts/wandb_data."
        )
    return [ShippedRun(model=model, curves=curves) for model, curves in models.items()]
