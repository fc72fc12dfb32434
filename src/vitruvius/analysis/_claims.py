"""Claims: what a number says against chance. Welch's test at 99.9 % decides, Cohen's d tells how much."""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.special import stdtrit

SAME = 1e-6  # a null that changes nothing up to rounding says nothing
CONFIDENCE = 0.999
NEGLIGIBLE = 0.2  # standard deviations, Cohen's "small"


class Sample(NamedTuple):
    """Mean, unbiased deviation (NaN when unknown) and number of images."""

    mean: float
    std: float
    n: int


def judge(observed: Sample, null: Sample, *, apart: float) -> tuple[float | None, str]:
    """(effect size, claim); no effect size where the spread is unknown or nil."""
    if apart <= SAME:
        return None, "the same by construction"
    if min(observed.n, null.n) < 2:
        return None, "too few images for a claim"
    gap = observed.mean - null.mean
    pooled = math.sqrt((observed.std**2 + null.std**2) / 2)
    effect = gap / pooled if pooled > 0 and math.isfinite(gap / pooled) else None
    if abs(gap) <= _allowance(observed, null):
        return effect, "indistinguishable from chance"
    side = "above" if gap > 0 else "below"
    hair = ", negligibly" if effect is not None and abs(effect) < NEGLIGIBLE else ""
    return effect, f"{side} chance by {abs(gap):.3g}{hair}"


def _allowance(a: Sample, b: Sample) -> float:
    """How far the means of two samples may differ by luck: Welch's interval."""
    parts = a.std**2 / a.n, b.std**2 / b.n
    total = sum(parts)
    if total <= 0:
        return 0.0
    freedom = 1 / ((parts[0] / total) ** 2 / (a.n - 1) + (parts[1] / total) ** 2 / (b.n - 1))
    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(total)
