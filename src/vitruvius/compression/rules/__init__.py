"""Rules: which pairs of query and key an average map lets go, known by name.

Every pair of a map gets a level and is kept below a limit, so that a limit can be searched.

H heads, N queries, M keys
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._registry import Registry
from vitruvius.heads import Site


class Rule:
    """Levels say in which order pairs leave: those below the limit stay. Subclasses are frozen dataclasses.

    With `uses_maps = False` a rule gets maps of zeros, and its ties go in order of sites, heads, queries and keys.
    """

    uses_maps: ClassVar[bool] = True

    @property
    def limit(self) -> float:
        """Pairs with a level below this are kept."""
        raise NotImplementedError

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """The level of every pair of a map (H, N, M) in float64; lower is more worth keeping.

        `map_` is average attention, `site` where it was recorded.
        """
        raise NotImplementedError


rules: Registry[Callable[..., Rule]] = Registry("rule", homes=["vitruvius.compression.rules"])


@rules.register("ratio")
@dataclass(frozen=True, kw_only=True)
class Ratio(Rule):
    """Remove the `ratio` least attended keys of every query, rounded up: the same share of every row."""

    ratio: float = 0.9

    def __post_init__(self) -> None:
        _check_share("ratio.ratio", self.ratio)

    @property
    def limit(self) -> float:
        return 1.0

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """Place in the row, 0 for the largest, over the number kept, so that 1 is the limit whatever M is."""
        keys = map_.shape[-1]
        order = map_.double().argsort(dim=-1, descending=True, stable=True)
        places = torch.empty_like(order).scatter_(-1, order, torch.arange(keys).expand_as(order).contiguous())
        return places.double() / max(keys - math.ceil(self.ratio * keys), 0.5)


@rules.register("information")
@dataclass(frozen=True, kw_only=True)
class Information(Rule):
    """Keep the fewest keys of each query that hold `mass` of its attention; `released` keeps one key more.

    You et al. 2023, "ViTCoD", arXiv:2210.09573, section IV-B.
    """

    mass: float = 0.9
    variant: Literal["paper", "released"] = "paper"

    def __post_init__(self) -> None:
        _check_share("information.mass", self.mass)

    @property
    def limit(self) -> float:
        return self.mass

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """The attention that larger keys hold; released: that larger keys but the last hold."""
        values, order = map_.double().sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(-1)
        for _ in range(2 if self.variant == "released" else 1):
            before = before.roll(1, -1)
            before[..., 0] = 0.0
        return torch.empty_like(before).scatter_(-1, order, before)


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


@rules.register("random")
@dataclass(frozen=True, kw_only=True)
class Random(Rule):
    """Remove a random `share` of the pairs of every head: the null hypothesis every other rule has to beat.

    `share`: of all pairs of a head, 0 to 1. `seed`: of the pattern; every head has its own, and every site by its name.
    """

    share: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share("random.share", self.share)

    @property
    def limit(self) -> float:
        return 1 - self.share

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        """A random order of the pairs of each head, spread evenly over [0, 1)."""
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(site.name.encode()))
        heads, pairs = map_.shape[0], map_[0].numel()
        order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(heads)])
        return ((order.double() + 0.5) / pairs).view(map_.shape)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} = {value}, expected a share from 0 to 1.")
