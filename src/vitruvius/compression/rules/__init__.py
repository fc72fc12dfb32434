"""Rules: which pairs of query and key an average map lets go; one file each, known by name.

Every pair of a map gets a level and is kept below a limit, so that a limit can be searched.

H heads, N queries, M keys
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

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


def places(values: Tensor) -> Tensor:
    """How many entries of its row are larger, ties in order: 0 for the largest, (…, M)."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(values.shape[-1]).expand_as(order).contiguous())
