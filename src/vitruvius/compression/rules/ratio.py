"""The same share of every row goes: the ⌈ratio · M⌉ keys with the least attention.       H heads, N queries, M keys"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.compression.rules import Rule, places, rules
from vitruvius.heads import Site


@rules.register("ratio")
@dataclass(frozen=True, kw_only=True)
class Ratio(Rule):
    """Remove the `ratio` least attended keys of every query, rounded up."""

    ratio: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"ratio.ratio = {self.ratio}, expected a share of keys from 0 to 1.")

    @property
    def limit(self) -> float:
        return 1.0

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """Place in the row over the number kept, so that 1 is the limit whatever M is."""
        keys = map_.shape[-1]
        return places(map_.double()).double() / max(keys - math.ceil(self.ratio * keys), 0.5)
