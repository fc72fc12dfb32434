"""Impulses on a grid of patches: which neighbour each head looks at, the map it should have, how close it comes.

Zheng et al. 2024, arXiv:2404.01139: an impulse is a k×k convolution filter with a single tap.
Letters: N patches, H heads. An offset (r, c) leads from the patch in row y, column x to (y + r, x + c).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.heads import Site

Offset = tuple[int, int]
Grid = tuple[int, int]
Order = Literal["distinct", "random", "cycle"]


class Quality(NamedTuple):
    """How well an attention map keeps to its target; the first two over the rows that have one."""

    probability: float  # mean attention on the target
    hits: float  # share of rows whose largest entry is the target
    mse: float  # over all entries


def check_kernel(kernel: int, site: Site) -> Grid:
    """The grid of a site, if an odd kernel of this size fits on it."""
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}, expected an odd number, so that there is a middle: 1, 3, 5, …")
    if site.grid is None:
        raise UnsuitableSite(
            f"{site.name!r} ({site.family}) has {site.num_queries} tokens on no known grid; an impulse needs one."
        )
    rows, columns = site.grid
    if rows * columns + site.num_prefix_tokens != site.num_queries:
        raise UnsuitableSite(
            f"{site.name!r} has {site.num_queries} tokens, but a {rows}×{columns} grid and "
            f"{site.num_prefix_tokens} prefix tokens make {rows * columns + site.num_prefix_tokens}."
        )
    if kernel > min(rows, columns):
        raise ConfigError(f"kernel={kernel} does not fit on the {rows}×{columns} grid of {site.name!r}; choose less.")
    return rows, columns


def offset_of(index: int, kernel: int) -> Offset:
    """The offset of a tap, taps counted in reading order."""
    return index // kernel - kernel // 2, index % kernel - kernel // 2


def draw_offsets(kernel: int, order: Order, generator: torch.Generator) -> Iterator[int]:
    """An endless supply of taps: `random` with replacement; `distinct` shuffles all taps again and again;
    `cycle` starts in the middle and goes outwards, ties in reading order."""
    taps = kernel * kernel
    match order:
        case "random":
            while True:
                yield int(torch.randint(taps, (1,), generator=generator, device=generator.device))
        case "distinct":
            while True:
                yield from torch.randperm(taps, generator=generator, device=generator.device).tolist()
        case "cycle":
            yield from itertools.cycle(sorted(range(taps), key=lambda tap: sum(o * o for o in offset_of(tap, kernel))))
        case _:
            raise ConfigError(f"offsets={order!r}, expected 'distinct', 'random' or 'cycle'.")


def partners(grid: Grid, offset: Offset) -> tuple[Tensor, Tensor]:
    """For every patch, the index of the patch at the offset (N,) and whether that lies on the grid (N,)."""
    rows, columns = grid
    y, x = torch.arange(rows)[:, None] + offset[0], torch.arange(columns)[None, :] + offset[1]
    inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return (y * columns + x).flatten(), inside.flatten()


def impulse_map(grid: Grid, offset: Offset) -> Tensor:
    """The target (N, N): one where key = query + offset; rows that would leave the grid are all zero."""
    key, inside = partners(grid, offset)
    target = torch.zeros(len(key), len(key), dtype=torch.float64)
    target[inside.nonzero().flatten(), key[inside]] = 1.0
    return target


def quality(attention: Tensor, grid: Grid, offset: Offset) -> Quality:
    """Compare an attention map (N, N) of patches with its target."""
    target = impulse_map(grid, offset)
    key, inside = partners(grid, offset)
    attention = attention.detach().cpu().double()
    return Quality(
        probability=float((attention * target).sum(-1)[inside].mean()),
        hits=float((attention.argmax(-1) == key)[inside].double().mean()),
        mse=float((attention - target).square().mean()),
    )
