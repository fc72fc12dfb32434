"""The curves the reproduction study ships (arXiv:2505.07908): CSV files with the columns Step, value, MIN, MAX.

One row is one epoch. Step advances by 15 per epoch and by 17 after a resumption, so it does not tell the epoch.
"""

from __future__ import annotations

import csv
import io
import math
import re
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


Curve = dict[int, float]  # epoch, counted from 0 → value


def read_shipped(path: StrPath) -> Curve:
    """Read one exported curve; cells that are empty or not finite are left out, their epoch stays counted."""
    head, *rows = [*csv.reader(io.StringIO(read_text(path).lstrip("\ufeff")))] or [[]]
    named = [name for name in head[1:] if not name.endswith(("__MIN", "__MAX"))]
    if head[:1] != ["Step"] or len(named) != 1:
        raise DataError(f"{path} has the columns {head}; expected Step, one value, and its __MIN and __MAX.")
    column = head.index(named[0])
    cells = [row[column] if column < len(row) else "" for row in rows]
    try:
        values = [float(cell or "nan") for cell in cells]
    except ValueError as error:
        raise DataError(f"{path} holds words where a number was expected ({error}).") from None
    return {epoch: value for epoch, value in enumerate(values) if math.isfinite(value)}


def read_shipped_folder(folder: str | Path) -> dict[tuple[str, str, str], Curve]:
    """(model, statistic, batch), by our names → curve, of a `folder` like the study's wandb_data.

    Its files are called deit_train_error.csv, vit_test_rel_error_wrt_h.csv, …
    """
    files = [(file, named) for file in sorted(Path(folder).rglob("*.csv")) if (named := NAME.fullmatch(file.stem))]
    if not files:
        raise DataError(
            f"{folder} holds no curves of the reproduction study; expected files such as deit_train_error.csv and "
            "deit_test_rel_error_wrt_h.csv, as in its folder scripts/wandb_data."
        )
    return {
        (named["model"], STATISTICS[named["statistic"]], BATCHES[named["batch"]]): read_shipped(file)
        for file, named in files
    }
