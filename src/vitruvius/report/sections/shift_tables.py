"""Tables of shift: corruption errors of several runs side by side, and accuracy on natural shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitruvius._errors import DataError
from vitruvius.evaluation.metrics import CorruptionErrors, corruption_errors
from vitruvius.evaluation.shift_report import PartScore, ShiftReport
from vitruvius.report._blocks import Cell, Column, Table
from vitruvius.report._numbers import DASH, interval, number, percent
from vitruvius.report._runs import Run

SEVERAL = "each its own baseline"  # runs that were evaluated against different models


def corruption_table(runs: Sequence[Run], name: str) -> Table:
    """Mean accuracy, mCE and relative mCE against the evaluation's baseline, and CE against the first run.

    `runs` are those of the page, in order; `name` is that of the set.
    """
    rows = [_numbers(run, name, runs[0]) for run in runs]
    titles = _used(_titles(runs, name), rows)
    cells = []
    for run, row in zip(runs, rows, strict=True):
        cells.append([Cell(text=run.name, colour=run.look.name), *(_cell(row, key, titles[key]) for key in titles)])
    columns = [Column(title="run"), *(Column(title=title, numeric=True) for title in titles.values())]
    caption = f"{name}: errors summed over severities, as a share of those of the model named; small numbers are 95 % "
    return Table(name=f"{name}-mce", columns=columns, cells=cells, rows=rows, caption=caption + "bootstrap intervals.")


def _used(titles: dict[str, str], rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """The columns that hold a number for at least one run."""
    return {key: title for key, title in titles.items() if any(row.get(key) is not None for row in rows)}


def _titles(runs: Sequence[Run], name: str) -> dict[str, str]:
    """Title of every column that there may be, by its key."""
    known = [run.shifts[name].corruption for run in runs]
    baselines = list(dict.fromkeys(str(one["baseline"]) for one in known if "baseline" in one))
    titles = {"mean_accuracy": "mean accuracy"}
    if baselines:
        baseline = baselines[0] if len(baselines) == 1 else SEVERAL
        titles["mce"] = f"mCE, {baseline}"
        titles["relative_mce"] = f"relative mCE, {baseline}"
    if len(runs) > 1:
        titles["mce_to_first"] = f"mCE, {runs[0].name}"
    titles["ece"] = "mean ECE"
    return titles


def natural_table(runs: Sequence[Run]) -> Table | None:
    """One line per set and run: accuracy, ECE and AURRA with their intervals.

    `runs` are those of the page. None where none has such a set.
    """
    found = [one for run in runs for one in _natural_parts(run)]
    if not found:
        return None
    titles = ("set", "run", "accuracy", "ECE", "RMS error", "AURRA", "images")
    columns = [Column(title=title, numeric=place > 1) for place, title in enumerate(titles)]
    order = sorted(found, key=lambda one: (one[1], one[2].name, one[0].index))
    rows = [_natural_row(*one) for one in order]
    cells = [_natural_cells(*one) for one in order]
    caption = "Natural shifts. Intervals are 95 %: Wilson's for accuracy, bootstrap for the others."
    return Table(name="natural-shifts", columns=columns, cells=cells, rows=rows, caption=caption)


def _natural_parts(run: Run) -> list[tuple[Run, str, PartScore]]:
    return [(run, report.name, part) for report in run.shifts.values() for part in _natural(report)]


def _natural(report: ShiftReport) -> list[PartScore]:
    """The parts that are not corruptions; none of a set with images from outside the classes."""
    if any(part.outside for part in report.parts):
        return []
    return [part for part in report.parts if part.severity is None]


def compare_to(run: Run, first: Run, name: str) -> CorruptionErrors | None:
    """CE of `run` against `first`, where both have parts in common that the first does not get all right.

    `name` is that of the set.
    """
    try:
        theirs = first.shifts[name].as_baseline(first.name)
        ours = run.shifts[name]
        errors = ours.as_baseline(run.name).errors
        judged = {group: errors[group] for group in ours.averaged}
        return corruption_errors(judged, theirs, clean_error=ours.clean_error)
    except DataError:
        return None


def _numbers(run: Run, name: str, first: Run) -> dict[str, object]:
    report = run.shifts[name]
    found = report.corruption
    low_error, high_error = found.get("mean_error_interval") or (None, None)
    mce_low, mce_high = found.get("mce_interval") or (None, None)
    against = compare_to(run, first, name)
    mce_to_first = None
    if against is not None:
        mce_to_first = against.mce
    return {
        "run": run.name,
        "mean_accuracy": _complement(number(found.get("mean_error"))),
        "mean_accuracy_low": _complement(high_error),
        "mean_accuracy_high": _complement(low_error),
        "baseline": found.get("baseline"),
        "mce": number(found.get("mce")),
        "mce_low": mce_low,
        "mce_high": mce_high,
        "relative_mce": number(found.get("relative_mce")),
        "mce_to_first": mce_to_first,
        "ece": _mean_ece(report),
    }


def _complement(share: float | None) -> float | None:
    if share is None:
        return None
    return 1 - share


def _mean_ece(report: ShiftReport) -> float | None:
    """Over the corruptions that means are over, as far as they have one."""
    graded = [part for part in report.parts if part.group in report.averaged]
    eces = [part.calibration["ece"] for part in graded if "ece" in part.calibration]
    if not eces:
        return None
    return sum(eces) / len(eces)


def _cell(row: dict[str, object], key: str, title: str) -> Cell:
    value = number(row.get(key))
    low, high = number(row.get(f"{key}_low")), number(row.get(f"{key}_high"))
    details = [interval(low, high)]
    if title.endswith(SEVERAL) and value is not None:
        details.append(f"of {row['baseline']}'s")
    return Cell(text=percent(value), value=value, detail=" ".join(filter(None, details)))


def _natural_row(run: Run, name: str, part: PartScore) -> dict[str, object]:
    head = {"set": name, "part": part.name, "run": run.name, "n": part.n, "accuracy": part.accuracy}
    ends = {
        f"{key}_{end}": v for key, pair in part.intervals.items() for end, v in zip(("low", "high"), pair, strict=True)
    }
    return head | {"low": part.low, "high": part.high, "aurra": part.aurra, **part.calibration, **ends}


def _natural_cells(run: Run, name: str, part: PartScore) -> list[Cell]:
    detail = {key: interval(low, high) for key, (low, high) in part.intervals.items()}
    ece, rms = part.calibration.get("ece"), part.calibration.get("rms")
    return [
        Cell(text=name if part.name == name else f"{name}, {part.name}"),
        Cell(text=run.name, colour=run.look.name),
        Cell(text=percent(part.accuracy), value=part.accuracy, detail=interval(part.low, part.high)),
        Cell(text=percent(ece), value=ece, detail=detail.get("ece", "")),
        Cell(text=percent(rms) if rms is not None else DASH, value=rms),
        Cell(text=percent(part.aurra), value=part.aurra, detail=detail.get("aurra", "")),
        Cell(text=str(part.n), value=part.n),
    ]
