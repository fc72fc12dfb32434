"""Chance decides: the null hypothesis every other rule has to beat.       H heads, N queries, M keys"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.compression.rules import Rule, rules
from vitruvius.heads import Site


@rules.register("random")
@dataclass(frozen=True, kw_only=True)
class Random(Rule):
    """Remove a random `share` of the pairs of every head; other heads and sites get other patterns.

    `share`: of all pairs of a head, 0 to 1. `seed`: of the pattern; a site's own comes from its name too.
    """

    share: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"random.share = {self.share}, expected a share of pairs from 0 to 1.")

    @property
    def limit(self) -> float:
        return 1 - self.share

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """A random order of the pairs of each head, spread evenly over [0, 1)."""
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(site.name.encode()))
        heads, pairs = map_.shape[0], map_[0].numel()
        order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(heads)])
        return ((order.double() + 0.5) / pairs).view(map_.shape)
