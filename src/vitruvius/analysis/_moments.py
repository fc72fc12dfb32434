"""Mean and spread of numbers that come in batches, from sums alone (Chan, Golub & LeVeque 1983); values that are not
finite are counted, not used. B images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Elementwise: how many values, their mean, the sum of squared deviations, and how many were left out."""

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
        kept = values.where(finite, 0.0)
        mean = kept.sum(0) / count.clamp(min=1)
        m2 = (kept - mean).square().where(finite, 0.0).sum(0)
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
