"""Detection: how well each run tells images from outside its classes from known ones, by three scores."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.report._blocks import Block, Cell, Column, Table
from vitruvius.report._names import shift_names
from vitruvius.report._numbers import interval, number, percent
from vitruvius.report._runs import Run
from vitruvius.report._section import section

NUMBERS = {"auroc": "AUROC", "aupr_out": "AUPR, outside", "aupr_in": "AUPR, known", "fpr95": "FPR95"}


@section("detection", title="Detection", order=47)
def detection(runs: Sequence[Run]) -> Sequence[Block]:
    """AUROC, AUPR both ways and FPR95 with their intervals. `runs` are those of the page."""
    return [_table(runs, name) for name in shift_names(runs) if any(_found(run, name) for run in runs)]


def _found(run: Run, name: str) -> dict[str, dict[str, object]]:
    if name in run.shifts:
        return run.shifts[name].detection
    return {}


def _table(runs: Sequence[Run], name: str) -> Table:
    lines = [(run, score, found) for run in runs for score, found in _found(run, name).items()]
    rows = [{"run": run.name, "score": score, **_flat(found)} for run, score, found in lines]
    cells = [
        [Cell(text=run.name, colour=run.look.name), Cell(text=score), *(_cell(row, key) for key in NUMBERS)]
        for (run, score, _), row in zip(lines, rows, strict=True)
    ]
    columns = [Column(title="run"), Column(title="score"), *(Column(title=t, numeric=True) for t in NUMBERS.values())]
    caption = (
        f"{name}: images from outside told from known ones. FPR95 is the share of known images taken for outside ones "
        "when 95 % of those are found: smaller is better. Intervals are 95 % bootstrap intervals."
    )
    return Table(name=f"{name}-detection", columns=columns, cells=cells, rows=rows, caption=caption)


def _flat(found: dict[str, object]) -> dict[str, object]:
    ends = found.get("intervals")
    if not isinstance(ends, dict):
        ends = {}
    flat: dict[str, object] = {}
    for key in NUMBERS:
        low, high = ends.get(key, (None, None))
        flat |= {key: found.get(key), f"{key}_low": low, f"{key}_high": high}
    return flat


def _cell(row: dict[str, object], key: str) -> Cell:
    value = number(row[key])
    detail = interval(number(row[f"{key}_low"]), number(row[f"{key}_high"]))
    return Cell(text=percent(value), value=value, detail=detail)
