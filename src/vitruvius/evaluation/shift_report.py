"""ShiftReport: what a ledger of shifted images says; prints as a table, saves as JSON, serves as a baseline."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius._files import read_text
from vitruvius._format import format_table
from vitruvius.corruptions.base import DRAWN
from vitruvius.evaluation.base import Columns
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics.bootstrap import bootstrap, multiplicities, percentiles
from vitruvius.evaluation.metrics.calibration import (
    EqualMass,
    EqualWidth,
    as_released,
    aurra,
    expected_error,
    largest_error,
    rms_error,
)
from vitruvius.evaluation.metrics.corruption import Baseline, Errors, corruption_errors, mean_error
from vitruvius.evaluation.metrics.detection import SCORES, detect, detection_intervals
from vitruvius.evaluation.result import (
    Report,
    Saved,
    format_grid,
    format_interval,
    label_drawn,
    per_cent,
    proportion,
    tabulate,
)
from vitruvius.evaluation.threats import Entry

REPLICATIONS = 200
BIN_SIZE = 100  # images in a bin of the RMS error, as in the papers
BIN_NUMBER = 15  # bins of equal mass of the adaptive ECE


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
class ShiftReport(Saved):
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
        graded = ((part.group, part.severity, part.accuracy) for part in self.parts)
        return tabulate((name, s, share) for name, s, share in graded if s is not None and share is not None)

    @property
    def averaged(self) -> dict[str, dict[int, float]]:
        """`accuracies` of the corruptions that means and mCE are over: those of the benchmark, where a set has one."""
        names = self.corruption.get("corruptions", self.accuracies)
        return {group: row for group, row in self.accuracies.items() if group in names}

    def label(self, group: str) -> str:
        """The name of a corruption in tables and figures: `frost (drawn)` where it stands in for photographs."""
        return label_drawn(group, self.drawn)

    def as_baseline(self, name: str) -> Baseline:
        """To compare other models with."""
        errors = {group: {s: 1 - a for s, a in row.items()} for group, row in self.accuracies.items()}
        return Baseline(name=name, errors=errors, clean_error=self.clean_error)

    @property
    def means(self) -> str:
        """Means over corruptions and severities, a line each: what a table of accuracies does not show."""
        return "\n".join(_corruption_lines(self.corruption))

    def __str__(self) -> str:
        """Tables first, then sentences."""
        lines = []
        if self.accuracies:
            extra = None
            if "ce" in self.corruption:
                extra = {"CE": {self.label(name): error for name, error in self.corruption["ce"].items()}}
            lines = format_grid(self.name, {self.label(name): row for name, row in self.accuracies.items()}, extra)
        plain = [part for part in self.parts if part.severity is None]
        if plain:
            heads = [self.name, "accuracy", "95 % interval", "n", "ECE", "AURRA"]
            lines += format_table(heads, [_cells(part) for part in plain])
        averaged = len(self.averaged)
        over = "" if averaged == len(self.accuracies) else f", over the {averaged} of the benchmark"
        lines += [*_corruption_lines(self.corruption, over), *_detection_lines(self.detection)]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}.")
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])


def load_shift_report(path: str | Path) -> ShiftReport:
    """What `save` wrote, without its ledger."""
    try:
        table = json.loads(read_text(path))
        return ShiftReport(**{**table, "parts": [PartScore(**part) for part in table["parts"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not the report of a shift: {error}.") from error


def corruption_report(report: Report, baseline: Baseline | None = None) -> ShiftReport | None:
    """What an evaluation under corruptions says beyond accuracies; None where it had none."""
    graded = [s for s in report.threats if s.severity is not None and s.n == report.num_images]
    if not graded:
        return None
    return reduce_entries(
        report.ledger,
        [Entry(spec=score.spec, short=score.family, severity=score.severity) for score in graded],
        name="corruptions",
        baseline=baseline,
        clean_error=1 - report["clean"].accuracy,
        clean=report.ledger.rows("clean"),
        drawn=sorted({score.family for score in graded if score.drawn}),
    )


def reduce_entries(
    ledger: Ledger,
    entries: Sequence[Entry],
    *,
    name: str,
    benchmark: Sequence[str] = (),
    outside: Container[str] = (),
    baseline: Baseline | None = None,
    clean_error: float | None = None,
    clean: Columns | None = None,
    drawn: Sequence[str] = (),
    remarks: Sequence[str] = (),
    **facts: Any,
) -> ShiftReport:
    """Scores of these entries of a ledger, and of all of them together.

    `benchmark` names the corruptions that mCE is the mean of, `outside` the entries of images of unknown classes;
    calibration is compared with that of `clean` rows; `facts` are other fields of the report.
    """
    rows = {entry.spec: ledger.rows(entry.spec) for entry in entries}
    parts = [_score(entry, rows[entry.spec], outside=entry.spec in outside) for entry in entries]
    inside, outer = ([rows[part.name] for part in parts if part.outside == apart] for apart in (False, True))
    graded = {(entry.short, entry.severity): entry for entry in entries if entry.severity is not None}
    judged = {key: rows[entry.spec] for key, entry in graded.items() if key[0] in benchmark}
    judged = judged or {key: rows[entry.spec] for key, entry in graded.items()}
    bins = {"clean": [] if clean is None else [clean], "shifted": inside}
    return ShiftReport(
        name=name,
        parts=parts,
        drawn=list(drawn),
        remarks=[*_few_images([part for part in parts if not part.outside]), *remarks, *([DRAWN] if drawn else [])],
        clean_error=clean_error,
        corruption=_corruption_of(judged, baseline, clean_error) if judged else {},
        detection=_detection_of(outer[0], inside[0]) if outer and inside else {},
        reliability={name: _reliability_of(parts) for name, parts in bins.items() if parts},
        ledger=ledger,
        **facts,
    )


def _score(entry: Entry, rows: Columns, *, outside: bool) -> PartScore:
    known: dict[str, Any] = {"name": entry.spec, "group": entry.short, "severity": entry.severity, "outside": outside}
    known["confidence"] = float(rows["confidence"].double().mean())
    if outside:
        return PartScore(**known, n=len(rows["id"]))
    columns = [rows["confidence"], rows["correct"]]
    measures = {"ece": lambda c, y: expected_error(EqualWidth()(c, y)), "aurra": aurra}
    if entry.severity is not None:
        measures = {}
    return PartScore(
        **known,
        **proportion(rows["correct"]),
        loss=float(rows["loss"].double().mean()),
        aurra=aurra(*columns),
        calibration=_calibration_of(rows),
        intervals={name: list(bootstrap(one, columns, replications=REPLICATIONS)) for name, one in measures.items()},
    )


def _calibration_of(rows: Columns) -> dict[str, float]:
    """ECE, MCE and RMS error; those that need more images than there are, are left out."""
    columns = rows["confidence"], rows["correct"]
    numbers = {"ece": expected_error(EqualWidth()(*columns)), "mce": largest_error(EqualWidth()(*columns))}
    try:
        numbers["ece_adaptive"] = expected_error(EqualMass(number=BIN_NUMBER)(*columns))
        hundreds = EqualMass(size=BIN_SIZE)(*columns)
        numbers |= {"rms": rms_error(hundreds), "rms_as_released": rms_error(as_released(hundreds))}
    except DataError:  # fewer images than a bin wants
        pass
    if "tempered" in rows:
        numbers["ece_tempered"] = expected_error(EqualWidth()(rows["tempered"], rows["correct"]))
    return numbers


def _reliability_of(parts: Sequence[Columns]) -> list[dict[str, float]]:
    """The bins of a reliability diagram over the images of all parts."""
    bins = EqualWidth()(*(torch.cat([rows[name] for rows in parts]) for name in ("confidence", "correct")))
    names = ("low", "high", "count", "confidence", "accuracy")
    return [dict(zip(names, row, strict=True)) for row in zip(*(getattr(bins, n).tolist() for n in names), strict=True)]


def _detection_of(outside: Columns, inside: Columns) -> dict[str, dict[str, Any]]:
    """By each score: AUROC, AUPR both ways, FPR95, and their bootstrap intervals."""
    found: dict[str, dict[str, Any]] = {}
    for score, column in SCORES.items():
        pair = -outside[column], -inside[column]
        ranges = detection_intervals(*pair, replications=REPLICATIONS)
        intervals = {name: list(interval) for name, interval in ranges.items()}
        found[score] = {**asdict(detect(*pair)), "intervals": intervals}
    return found


def _corruption_of(
    rows: Mapping[tuple[str, int], Columns], baseline: Baseline | None, clean_error: float | None
) -> dict[str, Any]:
    """Mean error by (corruption, severity), and against a baseline CE, mCE and relative mCE, with their intervals."""

    def tabulated(values: Iterable[float]) -> dict[str, dict[int, float]]:
        return tabulate((*key, value) for key, value in zip(rows, values, strict=True))

    errors = tabulated(1 - float(one["correct"].double().mean()) for one in rows.values())
    again = [tabulated(values) for values in _replicated(list(rows.values())).tolist()]
    mean = {
        "corruptions": list(errors),  # that all means are over
        "mean_error": mean_error(errors),
        "mean_error_interval": _interval(again, mean_error),
    }
    if baseline is None or not any(name in baseline.errors for name in errors):
        return mean
    found = corruption_errors(errors, baseline, clean_error=clean_error)
    return {
        **mean,
        "baseline": baseline.name,
        "ce": found.ce,
        "mce": found.mce,
        "mce_interval": _interval(again, lambda one: corruption_errors(one, baseline).mce),
        "relative_ce": found.relative_ce,
        "relative_mce": found.relative_mce,
        "skipped": list(found.skipped),
    }


def _interval(again: Sequence[Errors], statistic: Any) -> list[float]:
    return list(percentiles(torch.tensor([statistic(one) for one in again], dtype=torch.float64)))


def _replicated(rows: Sequence[Columns]) -> Tensor:
    """(r, P) errors of P parts, images drawn again: the same ones where all hold the same images, else each its own."""
    if all(torch.equal(one["id"], rows[0]["id"]) for one in rows):
        right = torch.stack([one["correct"].float() for one in rows], 1)  # (n, P)
        shares = multiplicities(len(right), replications=REPLICATIONS) @ right / len(right)
    else:
        shares = torch.stack([_redrawn(one["correct"], place) for place, one in enumerate(rows)], 1)
    return 1 - shares.double()


def _redrawn(correct: Tensor, seed: int) -> Tensor:
    """(r,) means of n answers drawn again: binomial."""
    n, generator = float(len(correct)), torch.Generator().manual_seed(seed)
    count = torch.full((REPLICATIONS,), n)
    return torch.binomial(count, torch.full_like(count, float(correct.double().mean())), generator=generator) / n


def _few_images(parts: Sequence[PartScore]) -> list[str]:
    """Which numbers are left out because bins would not be full."""
    few = sorted((part for part in parts if part.n < BIN_SIZE), key=lambda part: part.n)
    if not few:
        return []
    bins, numbers = f"bins of {BIN_SIZE}", "RMS error"
    if few[0].n < BIN_NUMBER:
        bins, numbers = f"{bins} and for {BIN_NUMBER} bins of equal mass", f"{numbers} and no adaptive ECE"
    others = f" Other parts with fewer than {BIN_SIZE}: {len(few) - 1}." if few[1:] else ""
    return [f"{few[0].name}: {few[0].n} images are too few for {bins}, so it has no {numbers}.{others}"]


def _cells(part: PartScore) -> list[str]:
    if part.accuracy is None or part.low is None or part.high is None or part.aurra is None:
        return [part.name, "", "from outside, no right answers", f"{part.n:,}", "", ""]
    shares = [f"{100 * share:.2f}" for share in (part.calibration["ece"], part.aurra)]
    return [part.name, per_cent(part.accuracy), format_interval(part.low, part.high), f"{part.n:,}", *shares]


def _corruption_lines(found: dict[str, Any], averaged: str = "") -> list[str]:
    """Mean accuracy and mCE in a sentence each; `averaged` says what the mean is over where it is not plain."""
    if not found:
        return []
    low, high = (100 * (1 - end) for end in reversed(found["mean_error_interval"]))
    lines = [f"mean accuracy {100 * (1 - found['mean_error']):.2f} % ({low:.2f} – {high:.2f}){averaged}"]
    if "mce" in found:
        low, high = (100 * end for end in found["mce_interval"])
        relative = found.get("relative_mce")
        also = "" if relative is None else f", relative mCE {100 * relative:.2f} %"
        lines.append(
            f"mCE {100 * found['mce']:.2f} % of {found['baseline']}'s ({low:.2f} – {high:.2f}), "
            f"over {len(found['ce'])} corruptions{also}"
        )
    return lines


def _detection_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    if not found:
        return []
    keys = {"auroc": "AUROC", "aupr_out": "AUPR out", "aupr_in": "AUPR in", "fpr95": "FPR95"}
    rows = [[score, *(f"{100 * numbers[key]:.2f}" for key in keys)] for score, numbers in found.items()]
    return format_table(["detection by", *keys.values()], rows)
