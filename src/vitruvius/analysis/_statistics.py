"""Running sums of statistics, and the rows they become: means, spreads, chance beside them, and a claim.

Memory does not grow with the number of images. A claim says how a number stands against chance: Welch's test at 99.9 %
decides, Cohen's d tells how much. B images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from vitruvius.analysis.base import Statistics
from vitruvius.analysis.table import SAME_BY_CONSTRUCTION, Curve, Row
from vitruvius.surgery.sites import abridge

MODEL = "model"  # the site of statistics that belong to no single one
OBSERVED = ""
SAME = 1e-6  # a null that changes nothing up to rounding says nothing
CONFIDENCE = 0.999
NEGLIGIBLE = 0.2  # standard deviations, Cohen's "small"
Key = tuple[str, str, str, str]  # site, analysis, statistic, null


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Elementwise: how many values, their mean, the sum of squared deviations (Chan, Golub & LeVeque 1983), and how
    many were left out because they are not finite.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    dropped: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Over the first axis of (B, …)."""
        values = values.detach().double().cpu()
        finite = values.isfinite()
        count = finite.sum(0)
        zeroed = values.where(finite, 0.0)
        mean = zeroed.sum(0) / count.clamp(min=1)
        m2 = (zeroed - mean).square().where(finite, 0.0).sum(0)
        return cls(count=count, mean=mean, m2=m2, dropped=len(values) - count)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        gap, share = other.mean - self.mean, other.count / count.clamp(min=1)
        return Moments(
            count=count,
            mean=self.mean + gap * share,
            m2=self.m2 + other.m2 + gap.square() * self.count * share,
            dropped=self.dropped + other.dropped,
        )

    @property
    def std(self) -> Tensor:
        """Unbiased; NaN where fewer than two values came."""
        return (self.m2 / torch.where(self.count > 1, self.count - 1, torch.nan)).sqrt()


@dataclass
class Sums:
    """What is left of all images; two add up to what both have seen."""

    moments: dict[Key, Moments] = field(default_factory=dict)
    apart: dict[Key, float] = field(default_factory=dict)  # largest relative distance from a null to the observed
    refused: dict[tuple[str, str], str] = field(default_factory=dict)  # (analysis, site) → why

    def note(self, site: str, analysis: str, null: str, statistics: Statistics) -> None:
        """Take in the answers for a batch, each (B, …)."""
        for name, values in statistics.items():
            self._add_moments((site, analysis, name, null), Moments.of(values))

    def add(self, other: Sums) -> None:
        """Take in what another process has seen."""
        for key, moments in other.moments.items():
            self._add_moments(key, moments)
        for key, distance in other.apart.items():
            self.apart[key] = max(self.apart.get(key, 0.0), distance)
        self.refused |= other.refused

    def _add_moments(self, key: Key, moments: Moments) -> None:
        self.moments[key] = self.moments[key] + moments if key in self.moments else moments

    def observed(self) -> dict[Key, Moments]:
        """Those with one number per head, chance left out."""
        return {key: found for key, found in self.moments.items() if key[3] == OBSERVED and found.mean.dim() == 1}


def make_rows(sums: Sums, analyses: Sequence[str], sites: Sequence[str], nulls: Sequence[str]) -> list[Row]:
    """Analysis by analysis, site by site, head by head, null by null, in the given orders."""
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in sums.observed():
        groups.setdefault((key[1], key[0]), []).append(key)
    keys = [key for name in analyses for site in (*sites, MODEL) for key in groups.get((name, site), [])]
    return [row for key in keys for row in _rows_of(sums, key, nulls)]


def make_curves(sums: Sums) -> list[Curve]:
    """The statistics that have one more axis."""
    return [
        Curve(site=site, analysis=analysis, statistic=statistic, null=null, mean=found.mean, std=found.std)
        for (site, analysis, statistic, null), found in sums.moments.items()
        if found.mean.dim() == 2
    ]


def make_remarks(sums: Sums) -> list[str]:
    """Why something is missing."""
    refused: dict[tuple[str, str], list[str]] = {}
    for (analysis, site), reason in sums.refused.items():
        refused.setdefault((analysis, reason.replace(repr(site), "it")), []).append(site)
    remarks = [f"{analysis} left out {abridge(sites)}: {reason}" for (analysis, reason), sites in refused.items()]
    lost: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for (site, analysis, statistic, _), found in sums.observed().items():
        if found.dropped.any():
            dropped = int(found.dropped.max())
            lost.setdefault((analysis, statistic), []).append((site, dropped, dropped + int(found.count.min())))
    for (analysis, statistic), sites_lost in lost.items():
        site, dropped, images = max(sites_lost, key=lambda each: each[1])
        remarks.append(
            f"{analysis}: {statistic} is not a finite number for some images at {abridge(s for s, _, _ in sites_lost)} "
            f"(at most {dropped} of {images}, at {site}); those images are left out of its mean."
        )
    return remarks


class Sample(NamedTuple):
    """Mean, unbiased deviation (NaN when unknown) and number of images."""

    mean: float
    std: float
    n: int


def judge(observed: Sample, null: Sample, *, apart: float) -> tuple[float | None, str]:
    """(effect size, claim); no effect size where the spread is unknown or nil."""
    if apart <= SAME:
        return None, SAME_BY_CONSTRUCTION
    if min(observed.n, null.n) < 2:
        return None, "too few images for a claim"
    gap = observed.mean - null.mean
    pooled = math.sqrt((observed.std**2 + null.std**2) / 2)
    effect = gap / pooled if pooled > 0 and math.isfinite(gap / pooled) else None
    if abs(gap) <= _allowance(observed, null):
        return effect, "indistinguishable from chance"
    side = "above" if gap > 0 else "below"
    negligible = ", negligibly" if effect is not None and abs(effect) < NEGLIGIBLE else ""
    return effect, f"{side} chance by {abs(gap):.3g}{negligible}"


def _allowance(a: Sample, b: Sample) -> float:
    """How far the means of two samples may differ by chance: Welch's interval."""
    parts = a.std**2 / a.n, b.std**2 / b.n
    total = sum(parts)
    if total <= 0:
        return 0.0
    freedom = 1 / ((parts[0] / total) ** 2 / (a.n - 1) + (parts[1] / total) ** 2 / (b.n - 1))
    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(total)


def _rows_of(sums: Sums, key: Key, nulls: Sequence[str]) -> list[Row]:
    """Of one statistic at one site: for each head one row per null that was drawn, or one without chance."""
    rows = []
    site, analysis, statistic, _ = key
    for head in range(len(sums.moments[key].mean)):
        observed = _sample(sums, key, head)
        if observed is None:
            continue
        row = Row(
            site=site,
            head=None if site == MODEL else head,
            analysis=analysis,
            statistic=statistic,
            mean=observed.mean,
            std=_finite(observed.std),
            n=observed.n,
        )
        beside = [_beside(sums, (site, analysis, statistic, null), head, observed, row) for null in nulls]
        rows += [with_null for with_null in beside if with_null is not None] or [row]
    return rows


def _beside(sums: Sums, key: Key, head: int, observed: Sample, row: Row) -> Row | None:
    """The row with the columns of one null; None where it was not drawn."""
    null = _sample(sums, key, head)
    if null is None:
        return None
    effect, claim = judge(observed, null, apart=sums.apart.get(key, math.inf))
    null_std = _finite(null.std)
    return replace(row, null=key[3], null_mean=null.mean, null_std=null_std, null_n=null.n, effect=effect, claim=claim)


def _sample(sums: Sums, key: Key, head: int) -> Sample | None:
    found = sums.moments.get(key)
    if found is None or not found.count[head]:
        return None
    return Sample(float(found.mean[head]), float(found.std[head]), int(found.count[head]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
