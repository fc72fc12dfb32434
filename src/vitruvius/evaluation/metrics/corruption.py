"""Corruption errors: CE, mCE and relative mCE, errors over severities against those of a baseline.

Hendrycks & Dietterich 2019, arXiv:1903.12261: CE = Σ_s E_s / Σ_s E'_s, relative CE = Σ_s (E_s − E_0) / Σ_s (E'_s −
E'_0), mCE their mean over corruptions; E' is AlexNet for ImageNet-C. All are shares: mCE 0.79 is said as 79 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from vitruvius._errors import DataError

Errors = Mapping[str, Mapping[int, float]]  # corruption → severity → share of wrong answers


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The errors of the model that others are compared with."""

    name: str
    errors: Errors
    clean_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class CorruptionErrors:
    """Ratios to a baseline; of corruptions that it lacks nothing is said."""

    baseline: str
    ce: dict[str, float]  # corruption → CE
    relative_ce: dict[str, float]  # empty where an error on clean images is not known
    skipped: tuple[str, ...] = ()  # corruptions or severities without a counterpart

    @property
    def mce(self) -> float:
        return math.fsum(self.ce.values()) / len(self.ce)

    @property
    def relative_mce(self) -> float | None:
        return math.fsum(self.relative_ce.values()) / len(self.relative_ce) if self.relative_ce else None


@cache
def alexnet() -> Baseline:
    """AlexNet's errors on ImageNet-C at every severity, and on ImageNet's validation images."""
    table = json.loads(files(__package__).joinpath("alexnet.json").read_text(encoding="utf-8"))
    errors = {name: dict(enumerate(row, start=1)) for name, row in table["errors"].items()}
    return Baseline(name="AlexNet", errors=errors, clean_error=table["clean_error"])


def mean_error(errors: Errors) -> float:
    """Mean over corruptions of the mean over severities."""
    return math.fsum(math.fsum(row.values()) / len(row) for row in errors.values()) / len(errors)


def corruption_errors(errors: Errors, baseline: Baseline, *, clean_error: float | None = None) -> CorruptionErrors:
    """CE of each corruption over the severities that both have, and relative CE where clean errors are known."""
    ce: dict[str, float] = {}
    relative: dict[str, float] = {}
    skipped: list[str] = []
    for name, row in errors.items():
        theirs = baseline.errors.get(name, {})
        skipped += [f"{name} {severity}" for severity in row if severity not in theirs] if theirs else [name]
        both = row.keys() & theirs.keys()
        if not both:
            continue
        ours_sum, theirs_sum = (math.fsum(errors[severity] for severity in both) for errors in (row, theirs))
        if theirs_sum <= 0:
            raise DataError(f"{baseline.name} makes no error under {name}; choose another baseline to divide by.")
        ce[name] = ours_sum / theirs_sum
        if clean_error is not None and baseline.clean_error is not None:
            rise = theirs_sum - len(both) * baseline.clean_error
            if rise > 0:  # a corruption that does not hurt the baseline has no relative CE
                relative[name] = (ours_sum - len(both) * clean_error) / rise
    if not ce:
        named = ", ".join(errors) or "there are none"
        raise DataError(f"{baseline.name} knows none of these corruptions: {named}.")
    return CorruptionErrors(baseline=baseline.name, ce=ce, relative_ce=relative, skipped=tuple(skipped))
