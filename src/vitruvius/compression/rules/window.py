"""A fixed window around every query, whatever the maps say: the pattern that rules which use maps have to beat.

N queries and as many keys
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.compression.rules import Rule, rules
from vitruvius.compression.rules.local_global import distances
from vitruvius.heads import Site


@rules.register("window")
@dataclass(frozen=True, kw_only=True)
class Window(Rule):
    """Keep patches at most `radius` rows and columns away; every head of a site gets the same window.

    A wanted sparsity grows or shrinks the window ring by ring; of the last ring the keys nearest to their query stay.
    """

    uses_maps: ClassVar[bool] = False
    radius: int = 2  # patches

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ConfigError(f"window.radius = {self.radius}, expected 0 or more patches.")

    @property
    def limit(self) -> float:
        return self.radius + 1.0

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """The ring of each key around its query; in a ring by distance, and at one distance query by query."""
        rings = distances(site)
        queries, keys = rings.shape
        spread = (torch.arange(queries).double() * 0.6180339887498949 % 1)[:, None].expand_as(rings)  # over the image
        order = torch.arange(rings.numel())
        for key in (spread, distances(site, p=2.0), rings):  # the last one counts most
            order = order[key.flatten()[order].argsort(stable=True)]
        place = torch.empty(len(order), dtype=torch.float64)
        place[order] = torch.arange(len(order)).double() / len(order)
        return (rings + place.view(queries, keys)).expand(map_.shape)
