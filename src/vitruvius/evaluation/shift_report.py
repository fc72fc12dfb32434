"""ShiftReport: what a ledger of shifted images says; prints as a table, saves as JSON, serves as a baseline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitruvius._errors import DataError
from vitruvius._files import atomic_write_text, read_text
from vitruvius.corruptions.base import DRAWN
from vitruvius.evaluation._shift_numbers import (
    calibration_of,
    corruption_of,
    detection_of,
    intervals_of,
    reliability_of,
)
from vitruvius.evaluation._text import few_images, format_corruption, format_shift, label_drawn
from vitruvius.evaluation.base import Columns
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics import Baseline, aurra
from vitruvius.evaluation.result import Report, wilson
from vitruvius.evaluation.threats import Entry
from vitruvius.shifts.base import Shift


@dataclass(frozen=True, kw_only=True)
class PartScore:
    """One part: a corruption at a severity, a variant, or a whole set. Without right answers, no accuracy."""

    name: str
    group: str
    severity: int | None
    n: int
    confidence: float  # mean
    outside: bool = False
    accuracy: float | None = None
    low: float | None = None  # Wilson, 95 %
    high: float | None = None
    loss: float | None = None
    aurra: float | None = None
    calibration: dict[str, float] = field(default_factory=dict)  # ece, mce, rms, …
    intervals: dict[str, list[float]] = field(default_factory=dict)  # bootstrap, 95 %


@dataclass(frozen=True, kw_only=True)
class ShiftReport:
    """Scores of all parts, and what the set as a whole says."""

    name: str
    parts: list[PartScore]
    missing: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)  # corruptions that stand in for published photographs
    remarks: list[str] = field(default_factory=list)
    clean_error: float | None = None
    temperature: float | None = None
    corruption: dict[str, Any] = field(default_factory=dict)  # mean_error, mce, relative_mce, ce …
    detection: dict[str, dict[str, Any]] = field(default_factory=dict)  # score → auroc, aupr_out, aupr_in, fpr95
    reliability: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # clean, shifted → bins
    ledger: Ledger = field(repr=False, compare=False, default_factory=Ledger)

    @property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """corruption → severity → accuracy."""
        grid: dict[str, dict[int, float]] = {}
        for part in self.parts:
            if part.severity is not None and part.accuracy is not None:
                grid.setdefault(part.group, {})[part.severity] = part.accuracy
        return grid

    @property
    def averaged(self) -> dict[str, dict[int, float]]:
        """`accuracies` of the corruptions that means and mCE are over: those of the benchmark, where a set has one."""
        names = self.corruption.get("corruptions", self.accuracies)
        return {group: row for group, row in self.accuracies.items() if group in names}

    def label(self, group: str) -> str:
        """The name of a corruption in tables and figures: `frost (drawn)` where it stands in for photographs.

        `group` is the name of a corruption.
        """
        return label_drawn(group, self.drawn)

    def as_baseline(self, name: str) -> Baseline:
        """To compare other models with.

        `name` is what tables call it.
        """
        errors = {group: {s: 1 - a for s, a in row.items()} for group, row in self.accuracies.items()}
        return Baseline(name=name, errors=errors, clean_error=self.clean_error)

    @property
    def means(self) -> str:
        """Means over corruptions and severities, a line each: what a table of accuracies does not show."""
        return "\n".join(format_corruption(self.corruption))

    def __str__(self) -> str:
        return format_shift(self)

    def to_dict(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name not in ("ledger", "parts")]
        return {**{name: getattr(self, name) for name in names}, "parts": [asdict(part) for part in self.parts]}

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON.

        `path` is the file.
        """
        atomic_write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")


def load_shift_report(path: str | Path) -> ShiftReport:
    """What `save` wrote, without its ledger.

    `path` is the file.
    """
    try:
        table = json.loads(read_text(path))
        return ShiftReport(**{**table, "parts": [PartScore(**part) for part in table["parts"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not the report of a shift: {error}.") from error


def corruption_report(report: Report, baseline: Baseline | None = None) -> ShiftReport | None:
    """What an evaluation under corruptions says beyond accuracies; None where it had none.

    `report` is that of `evaluate`; `baseline` is what errors are divided by (default: none, so no mCE).
    """
    graded = [s for s in report.threats if s.severity is not None and s.n == report.num_images]
    if not graded:
        return None
    ledger = report.ledger
    found = reduce_entries(
        ledger,
        [Entry(spec=score.spec, short=score.family, severity=score.severity) for score in graded],
        name="corruptions",
        baseline=baseline,
        clean_error=1 - report["clean"].accuracy,
        clean=ledger.rows("clean"),
    )
    return _with_drawn(found, sorted({score.family for score in graded if score.drawn}))


def summarise_shift(
    ledger: Ledger,
    shift: Shift,
    remarks: Sequence[str],
    baseline: Baseline | None,
    clean_error: float | None,
    temperature: float | None,
) -> ShiftReport:
    """Reduce the ledger of a published set.

    ledger: all rows, by part.
    shift: the set, with its parts.
    remarks: what was found while its images were read.
    baseline: what errors are divided by; None: nothing.
    clean_error: the model's error on images as they are; None where it is not known.
    temperature: that logits were divided by; None: none.
    """
    entries = [Entry(spec=p.name, short=p.group, severity=p.severity) for p in shift.parts if ledger.number(p.name)]
    outside = {part.name for part in shift.parts if part.outside}
    if not entries:
        raise DataError(f"no image of {shift.name} could be read; nothing to report.")
    report = reduce_entries(
        ledger, entries, name=shift.name, benchmark=shift.benchmark, outside=outside, baseline=baseline,
        clean_error=clean_error,
    )  # fmt: skip
    facts = {"missing": list(shift.missing), "remarks": [*report.remarks, *remarks], "temperature": temperature}
    return _with_drawn(ShiftReport(**{**vars(report), **facts}), shift.drawn)


def _with_drawn(report: ShiftReport, drawn: Sequence[str]) -> ShiftReport:
    """The report, which says what of it stands in for photographs."""
    if not drawn:
        return report
    return replace(report, drawn=list(drawn), remarks=[*report.remarks, DRAWN])


def reduce_entries(
    ledger: Ledger,
    entries: Sequence[Entry],
    *,
    name: str,
    benchmark: Sequence[str] = (),
    outside: Iterable[str] = (),
    baseline: Baseline | None = None,
    clean_error: float | None = None,
    clean: Columns | None = None,
) -> ShiftReport:
    """Scores of these entries of a ledger, and of all of them together.

    ledger: all rows, by entry.
    entries: the parts to be scored.
    name: of the set.
    benchmark: corruptions that mCE is the mean of; default: none.
    outside: entries of images of unknown classes, to be detected; default: none.
    baseline: what errors are divided by; default: none.
    clean_error: the model's error on images as they are; default: not known.
    clean: rows of images as they are, that calibration is compared with; default: none.
    """
    apart = set(outside)
    rows = {entry.spec: ledger.rows(entry.spec) for entry in entries}
    parts = [_score(entry, rows[entry.spec], outside=entry.spec in apart) for entry in entries]
    inside = [columns for spec, columns in rows.items() if spec not in apart]
    outer = [columns for spec, columns in rows.items() if spec in apart]
    corruption: dict[str, Any] = {}
    if graded := _graded(entries, benchmark):
        corruption = corruption_of(ledger, graded, baseline, clean_error)
    return ShiftReport(
        name=name,
        parts=parts,
        remarks=few_images([part for part in parts if not part.outside]),
        clean_error=clean_error,
        corruption=corruption,
        detection=_detection(outer, inside),
        reliability=_reliability(clean, inside),
        ledger=ledger,
    )


def _detection(outside: Sequence[Columns], inside: Sequence[Columns]) -> dict[str, Any]:
    """How well images from outside the classes are told apart, where there are such images."""
    if not outside or not inside:
        return {}
    return detection_of(outside[0], inside[0])


def _graded(entries: Sequence[Entry], benchmark: Sequence[str]) -> dict[tuple[str, int], Entry]:
    """Entries that have a severity, by corruption and severity: those of the benchmark, or all if it has none."""
    graded = {(entry.short, entry.severity): entry for entry in entries if entry.severity is not None}
    judged = {key: entry for key, entry in graded.items() if key[0] in benchmark}
    return judged or graded


def _score(entry: Entry, rows: Columns, *, outside: bool) -> PartScore:
    n = len(rows["id"])
    known: Mapping[str, Any] = {"name": entry.spec, "group": entry.short, "severity": entry.severity, "n": n}
    confidence = float(rows["confidence"].double().mean())
    if outside:
        return PartScore(**known, confidence=confidence, outside=True)
    correct = int(rows["correct"].sum())
    low, high = wilson(correct, n)
    return PartScore(
        **known,
        confidence=confidence,
        accuracy=correct / n,
        low=low,
        high=high,
        loss=float(rows["loss"].double().mean()),
        aurra=aurra(rows["confidence"], rows["correct"]),
        calibration=calibration_of(rows),
        intervals=intervals_of(rows) if entry.severity is None else {},
    )


def _reliability(clean: Columns | None, shifted: Sequence[Columns]) -> dict[str, list[dict[str, float]]]:
    bins = {"clean": reliability_of([] if clean is None else [clean]), "shifted": reliability_of(shifted)}
    return {name: one for name, one in bins.items() if one}
