"""From running sums to rows: means, spreads, nulls and claims; what was not finite or refused becomes a remark.

A claim says how a number stands against chance: Welch's test at 99.9 % decides, Cohen's d tells how much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import stdtrit

from vitruvius.analysis._collect import MODEL, OBSERVED, Key, Sums
from vitruvius.analysis._moments import Moments
from vitruvius.analysis._registry import Question
from vitruvius.analysis._table import Curve, Row
from vitruvius.surgery import abridge

SAME = 1e-6  # a null that changes nothing up to rounding says nothing
CONFIDENCE = 0.999
NEGLIGIBLE = 0.2  # standard deviations, Cohen's "small"


def make_rows(sums: Sums, questions: Sequence[Question], sites: Sequence[str], nulls: Sequence[str]) -> list[Row]:
    """Site by site, head by head, in the order in which the questions were asked."""
    rows = []
    for q in questions:
        for site in (*sites, MODEL):
            for _, _, statistic, _ in _keys(sums, site, q.name):
                rows += _statistic(sums, (site, q.name, statistic, OBSERVED), nulls)
    return rows


def make_curves(sums: Sums) -> list[Curve]:
    """The statistics that have one more axis."""
    return [
        Curve(site=key[0], analysis=key[1], statistic=key[2], null=key[3], mean=found.mean, std=found.std)
        for key, found in sums.moments.items()
        if found.mean.dim() == 2
    ]


def make_remarks(sums: Sums) -> list[str]:
    """Why something is missing."""
    refused: dict[tuple[str, str], list[str]] = {}
    for (analysis, site), reason in sums.refused.items():
        refused.setdefault((analysis, reason.replace(repr(site), "it")), []).append(site)
    remarks = [f"{analysis} left out {abridge(own)}: {reason}" for (analysis, reason), own in refused.items()]
    return remarks + _remarks_on_lost_images(sums)


def _remarks_on_lost_images(sums: Sums) -> list[str]:
    remarks = []
    lost: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for (site, analysis, statistic, null), found in sums.moments.items():
        if null == OBSERVED and found.mean.dim() == 1 and found.dropped.any():
            worst = int(found.dropped.max())
            lost.setdefault((analysis, statistic), []).append((site, worst, worst + int(found.count.min())))
    for (analysis, statistic), places in lost.items():
        site, dropped, images = max(places, key=lambda place: place[1])
        remarks.append(
            f"{analysis}: {statistic} is not a finite number for some images at {abridge(p[0] for p in places)} "
            f"(at most {dropped} of {images}, at {site}); those images are left out of its mean."
        )
    return remarks


def _keys(sums: Sums, site: str, analysis: str) -> list[Key]:
    """The observed statistics, one number per head."""
    return [
        key
        for key, found in sums.moments.items()
        if key[0] == site and key[1] == analysis and key[3] == OBSERVED and found.mean.dim() == 1
    ]


def _statistic(sums: Sums, key: Key, nulls: Sequence[str]) -> list[Row]:
    found, rows = sums.moments[key], []
    site, analysis, statistic, _ = key
    for head in range(len(found.mean)):
        sample = _sample(found, head)
        if sample is None:
            continue
        own = {
            "site": site,
            "head": None if site == MODEL else head,
            "analysis": analysis,
            "statistic": statistic,
            "mean": sample.mean,
            "std": _known(sample.std),
            "n": sample.n,
        }
        beside = [_beside(sums, (*key[:3], null), head, sample) for null in nulls]
        rows += _rows_beside(own, beside)
    return rows


def _rows_beside(own: dict[str, Any], beside: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per null that was drawn; one without where none was."""
    told = [columns for columns in beside if columns]
    if not told:
        return [Row(**own)]
    return [Row(**own, **columns) for columns in told]


def _beside(sums: Sums, key: Key, head: int, observed: Sample) -> Mapping[str, object]:
    """The columns of one null, or nothing where none was drawn."""
    null = None
    if key in sums.moments:
        null = _sample(sums.moments[key], head)
    if null is None:
        return {}
    effect, claim = judge(observed, null, apart=sums.apart.get(key, math.inf))
    columns = {"null": key[3], "null_mean": null.mean, "null_std": _known(null.std), "null_n": null.n}
    return {**columns, "effect": effect, "claim": claim}


def _sample(found: Moments, head: int) -> Sample | None:
    n = int(found.count[head])
    if n:
        return Sample(float(found.mean[head]), float(found.std[head]), n)
    return None


def _known(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None


class Sample(NamedTuple):
    """Mean, unbiased deviation (NaN when unknown) and number of images."""

    mean: float
    std: float
    n: int


def _effect_size(gap: float, observed: Sample, null: Sample) -> float | None:
    """Cohen's d; None where the spread is unknown or nil."""
    pooled = math.sqrt((observed.std**2 + null.std**2) / 2)
    if pooled > 0 and math.isfinite(gap / pooled):
        return gap / pooled
    return None


def judge(observed: Sample, null: Sample, *, apart: float) -> tuple[float | None, str]:
    """(effect size, claim); no effect size where the spread is unknown or nil."""
    if apart <= SAME:
        return None, "the same by construction"
    if min(observed.n, null.n) < 2:
        return None, "too few images for a claim"
    gap = observed.mean - null.mean
    effect = _effect_size(gap, observed, null)
    if abs(gap) <= _allowance(observed, null):
        return effect, "indistinguishable from chance"
    side = "below"
    if gap > 0:
        side = "above"
    hair = ""
    if effect is not None and abs(effect) < NEGLIGIBLE:
        hair = ", negligibly"
    return effect, f"{side} chance by {abs(gap):.3g}{hair}"


def _allowance(a: Sample, b: Sample) -> float:
    """How far the means of two samples may differ by chance: Welch's interval."""
    parts = a.std**2 / a.n, b.std**2 / b.n
    total = sum(parts)
    if total <= 0:
        return 0.0
    freedom = 1 / ((parts[0] / total) ** 2 / (a.n - 1) + (parts[1] / total) ** 2 / (b.n - 1))
    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(total)
