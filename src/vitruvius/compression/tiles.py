"""Whole tiles instead of single pairs: squares of queries and keys that a kernel computes or skips together.

Tokens are taken in an order in which neighbours on the grid of patches follow each other, as `sparse_softmax` takes
them; a tile is T of them as queries by T as keys. Protected tokens are in no tile: they are kept whole.
H heads, N queries, M keys, R × C tiles; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.sparse_softmax import tile_order
from vitruvius.heads import Site


@dataclass(frozen=True)
class Tiling:
    """Which tile every pair of a site is in."""

    rows: Tensor  # (N): the block of each query, -1: none
    columns: Tensor  # (M): the block of each key

    @classmethod
    def of(cls, site: Site, protected: Sequence[int], size: int) -> Tiling:
        """The tiles of a site.

        site: where attention happens. protected: tokens that are in no tile. size: queries and keys of a tile.
        """
        if size < 2:
            raise ConfigError(f"tiles = {size}, expected the number of queries and keys of a tile, such as 16.")
        square = site.num_queries == site.num_keys
        keys = _blocks(tile_order(site.num_keys, site.grid, site.num_prefix_tokens, size), protected, size)
        if square:
            return cls(keys, keys)
        return cls(_blocks(torch.arange(site.num_queries), (), size), keys)

    def means(self, levels: Tensor) -> Tensor:
        """(H, R, C) mean levels of tiles, of pairs' `levels` (H, N, M); −∞ for a tile with a pair that always stays."""
        into, out_of = (_one_hot(blocks).to(levels) for blocks in (self.rows, self.columns))
        stays = levels == -torch.inf
        means = into @ levels.masked_fill(stays, 0.0) @ out_of.T / (into.sum(1)[:, None] * out_of.sum(1))
        return means.masked_fill(into @ stays.to(levels) @ out_of.T > 0, -torch.inf)

    def spread(self, tiles: Tensor, elsewhere: float) -> Tensor:
        """(H, N, M): the number of its tile for every pair; `elsewhere` for pairs in none. `tiles` is (H, R, C)."""
        spread = tiles[:, self.rows.clamp(min=0)][:, :, self.columns.clamp(min=0)]
        inside = (self.rows >= 0)[:, None] & (self.columns >= 0)
        return torch.where(inside, spread, elsewhere)


def rank_tiles(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mean levels of tiles by site → their places among all tiles, from 0; ties in order of sites, heads and places.

    No two tiles share a place, so an exact number of pairs cuts through one tile at most.

    `means` are levels of tiles by site, as `Tiling.means` gives them.
    """
    order = torch.cat([mean.flatten() for mean in means.values()]).argsort(stable=True)
    places = torch.empty(len(order), dtype=torch.float64).scatter_(0, order, torch.arange(len(order)).double())
    parts = places.split([mean.numel() for mean in means.values()])
    return {name: part.view(mean.shape) for (name, mean), part in zip(means.items(), parts, strict=True)}


def best_tiles(means: Tensor) -> Tensor:
    """(H, R, C) bool: the tile of the lowest mean level in each row of tiles, so that no query is left without keys.

    `means` are levels of the tiles of one site, as `Tiling.means` gives them.
    """
    best = means.argmin(-1, keepdim=True)
    return torch.zeros(means.shape, dtype=torch.bool).scatter_(-1, best, True)


def _blocks(order: Tensor, protected: Sequence[int], size: int) -> Tensor:
    """(N): the block of each token when those that are not protected are taken in this order, `size` at a time."""
    out = torch.isin(order, torch.tensor(list(protected), dtype=order.dtype))
    blocks = torch.full((len(order),), -1)
    taken = order[~out]
    blocks[taken] = torch.arange(len(taken)) // size
    return blocks


def _one_hot(blocks: Tensor) -> Tensor:
    """(R, N) bool: which tokens are in which block."""
    return blocks == torch.arange(int(blocks.max()) + 1)[:, None]
