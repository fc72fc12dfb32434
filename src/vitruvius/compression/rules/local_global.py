"""A window around every query, alone or with tokens that see and are seen by all.       H heads, N queries, M keys"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.compression.rules import Rule, rules
from vitruvius.heads import Site


@rules.register("local_global")
@dataclass(frozen=True, kw_only=True)
class LocalGlobal(Rule):
    """Keep patches at most `radius` rows and columns away, and the `tokens` most attended ones of each head."""

    radius: int = 2  # patches
    tokens: int = 1  # global ones besides class and register tokens, which always are

    def __post_init__(self) -> None:
        if self.radius < 0 or self.tokens < 0:
            raise ConfigError(f"local_global got radius={self.radius}, tokens={self.tokens}, expected 0 or more.")

    @property
    def limit(self) -> float:
        return self.radius + 1.0

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """Distance in patches, within it by attention; global tokens come before all."""
        distance = distances(site).expand(map_.shape)  # (H, N, N)
        levels = distance + (1 - map_.double().clamp(0, 1)) * 0.5
        prefix = site.num_prefix_tokens
        attended = map_.double().mean(-2)[:, prefix:]  # (H, patches)
        chosen = attended.topk(min(self.tokens, attended.shape[-1]), -1).indices + prefix
        reaching = torch.zeros(map_.shape[0], map_.shape[-1], dtype=torch.bool).scatter_(-1, chosen, True)
        reaching[:, :prefix] = True
        return torch.where(reaching[:, :, None] | reaching[:, None, :], -1.0, levels)


@rules.register("window")
@dataclass(frozen=True, kw_only=True)
class Window(Rule):
    """Keep patches at most `radius` rows and columns away, whatever the maps say; all heads of a site get the same.

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


def distances(site: Site, p: float = torch.inf) -> Tensor:
    """Distance of patches on their grid, (N, N); prefix tokens are next to everything.

    `site` says which grid of patches, and how many prefix tokens. `p`: which norm; infinity counts rows or columns,
    whichever are more, 2 is the straight line.
    """
    if site.grid is None or site.num_queries != site.num_keys:
        raise UnsuitableSite(
            f"a window needs queries and keys on one grid of patches; {site.name!r} attends over {site.attends} "
            f"from {site.num_queries} to {site.num_keys} and its grid is {site.grid}. Choose other sites with where=…"
        )
    rows, columns = site.grid
    at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double()  # (patches, 2)
    apart = torch.cdist(at, at, p=p, compute_mode="donot_use_mm_for_euclid_dist")  # equal distances stay equal
    full = torch.zeros(site.num_queries, site.num_keys, dtype=torch.float64)
    full[site.num_prefix_tokens :, site.num_prefix_tokens :] = apart
    return full
