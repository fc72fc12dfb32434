"""Retained mass: the fewest keys of a query whose average attention adds up to `mass`.

You et al. 2023, "ViTCoD", arXiv:2210.09573, section IV-B.       H heads, N queries, M keys
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.compression.rules import Rule, rules
from vitruvius.heads import Site


@rules.register("information")
@dataclass(frozen=True, kw_only=True)
class Information(Rule):
    """Keep the fewest keys of each query that hold `mass` of its attention; `released` keeps one key more."""

    mass: float = 0.9
    variant: Literal["paper", "released"] = "paper"

    def __post_init__(self) -> None:
        if not 0 <= self.mass <= 1:
            raise ConfigError(f"information.mass = {self.mass}, expected a share of attention from 0 to 1.")

    @property
    def limit(self) -> float:
        return self.mass

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """The attention that larger keys hold; released: that larger keys but the last hold."""
        values, order = map_.double().sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(-1).roll(1, -1)
        before[..., 0] = 0.0
        if self.variant == "released":
            before = before.roll(1, -1)
            before[..., 0] = 0.0
        return torch.empty_like(before).scatter_(-1, order, before)
