"""What a ledger of shifted images says: calibration of a part, corruption errors with intervals, detection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.evaluation.base import Columns
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics import (
    Baseline,
    Bins,
    EqualMass,
    EqualWidth,
    Errors,
    as_released,
    aurra,
    bootstrap,
    corruption_errors,
    detect,
    detection_intervals,
    expected_error,
    largest_error,
    mean_error,
    rms_error,
)
from vitruvius.evaluation.metrics.bootstrap import multiplicities, percentiles
from vitruvius.evaluation.metrics.detection import SCORES
from vitruvius.evaluation.threats import Entry

REPLICATIONS = 200
BIN_SIZE = 100  # images in a bin of the RMS error, as in the papers
BIN_NUMBER = 15  # bins of equal mass of the adaptive ECE


def calibration_of(rows: Columns) -> dict[str, float]:
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


def intervals_of(rows: Columns) -> dict[str, list[float]]:
    """Bootstrap intervals of ECE and AURRA."""
    columns = [rows["confidence"], rows["correct"]]
    measures = {"ece": lambda c, y: expected_error(EqualWidth()(c, y)), "aurra": aurra}
    return {name: list(bootstrap(one, columns, replications=REPLICATIONS)) for name, one in measures.items()}


def reliability_of(parts: Sequence[Columns]) -> list[dict[str, float]]:
    """The bins of a reliability diagram over the images of all parts."""
    if not parts:
        return []
    confidence, correct = (torch.cat([rows[name] for rows in parts]) for name in ("confidence", "correct"))
    return listed(EqualWidth()(confidence, correct))


def listed(bins: Bins) -> list[dict[str, float]]:
    names = ("low", "high", "count", "confidence", "accuracy")
    return [dict(zip(names, row, strict=True)) for row in zip(*(getattr(bins, n).tolist() for n in names), strict=True)]


def detection_of(outside: Columns, inside: Columns) -> dict[str, dict[str, Any]]:
    """By each score: AUROC, AUPR both ways, FPR95, and their bootstrap intervals."""
    found: dict[str, dict[str, Any]] = {}
    for score, column in SCORES.items():
        if column not in outside or column not in inside:
            continue  # a ledger from before this column
        pair = -outside[column], -inside[column]
        ranges = detection_intervals(*pair, replications=REPLICATIONS)
        intervals = {name: list(interval) for name, interval in ranges.items()}
        found[score] = {**dataclasses.asdict(detect(*pair)), "intervals": intervals}
    return found


def errors_of(ledger: Ledger, entries: Mapping[tuple[str, int], Entry]) -> dict[str, dict[int, float]]:
    """corruption → severity → share of wrong answers."""
    errors: dict[str, dict[int, float]] = {}
    for (group, severity), entry in entries.items():
        errors.setdefault(group, {})[severity] = 1 - float(ledger.rows(entry.spec)["correct"].double().mean())
    return errors


def corruption_of(
    ledger: Ledger,
    entries: Mapping[tuple[str, int], Entry],
    baseline: Baseline | None,
    clean_error: float | None,
) -> dict[str, Any]:
    """Mean error, and against a baseline CE, mCE and relative mCE, with bootstrap intervals."""
    errors, again = errors_of(ledger, entries), _replicated(ledger, entries)
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


def _replicated(ledger: Ledger, entries: Mapping[tuple[str, int], Entry]) -> list[dict[str, dict[int, float]]]:
    """Errors with images drawn again: the same draw for all parts if they hold the same images, else each its own."""
    rows = [ledger.rows(entry.spec) for entry in entries.values()]
    same = all(torch.equal(one["id"], rows[0]["id"]) for one in rows)
    if same:
        right = torch.stack([one["correct"].float() for one in rows], 1)  # (n, P)
        shares = multiplicities(len(right), replications=REPLICATIONS) @ right / len(right)  # (r, P)
    else:
        shares = torch.stack([_redrawn(one["correct"], place) for place, one in enumerate(rows)], 1)
    return [_tabulated(entries, 1 - row) for row in shares.double()]


def _redrawn(correct: Tensor, seed: int) -> Tensor:
    """(r,) means of n answers drawn again: binomial."""
    n, generator = float(len(correct)), torch.Generator().manual_seed(seed)
    count = torch.full((REPLICATIONS,), n)
    return torch.binomial(count, torch.full_like(count, float(correct.double().mean())), generator=generator) / n


def _tabulated(entries: Mapping[tuple[str, int], Entry], values: Tensor) -> dict[str, dict[int, float]]:
    table: dict[str, dict[int, float]] = {}
    for (group, severity), value in zip(entries, values.tolist(), strict=True):
        table.setdefault(group, {})[severity] = value
    return table
