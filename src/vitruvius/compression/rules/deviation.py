"""Keys above the mean of their row by a number of standard deviations stay.       H heads, N queries, M keys"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius.compression.rules import Rule, rules
from vitruvius.heads import Site


@rules.register("deviation")
@dataclass(frozen=True, kw_only=True)
class Deviation(Rule):
    """Keep what is at least `deviations` standard deviations above the mean of its row (population deviation)."""

    deviations: float = 0.5

    @property
    def limit(self) -> float:
        return math.nextafter(-self.deviations, math.inf)  # at least, not above

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """Minus the standard score; a row of equal entries is kept whole."""
        a = map_.double()
        spread = a.std(-1, keepdim=True, correction=0)
        score = (a - a.mean(-1, keepdim=True)) / spread
        return torch.where(spread > 0, -score, -torch.inf)
