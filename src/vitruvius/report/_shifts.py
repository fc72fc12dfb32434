"""What a run did on shifted images: the reports in its folder evaluation/shifts, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitruvius._errors import DataError, RunError
from vitruvius.evaluation import ShiftReport, load_shift_report

if TYPE_CHECKING:
    from vitruvius.report._runs import Run


def read_shifts(folder: Path, remarks: list[str]) -> dict[str, ShiftReport]:
    """Every readable report; those that cannot be read, and what they name as missing, are remarked."""
    found: dict[str, ShiftReport] = {}
    for file in sorted(folder.glob("*/report.json")):
        try:
            report = load_shift_report(file)
        except (DataError, RunError) as error:
            remarks.append(f"{' '.join(str(error).split()).replace(str(folder), 'evaluation/shifts')} It is left out.")
            continue
        found[report.name] = report
        remarks += [f"{report.name}: {remark}" for remark in report.remarks]
        if report.missing:
            remarks.append(f"{report.name}: not there: {', '.join(report.missing)}.")
    return found


def shift_names(runs: Sequence[Run]) -> list[str]:
    """Names of all shifts of the runs, in order of appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.shifts))
