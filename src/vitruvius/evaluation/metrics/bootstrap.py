"""Bootstrap: an interval of any number of a ledger, from images drawn again with replacement (Efron 1979).

n images, r replications.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError


class Interval(NamedTuple):
    """The middle 95 % (or another level) of the replications."""

    low: float
    high: float


def bootstrap(
    statistic: Callable[..., float],
    *groups: Sequence[Tensor],
    replications: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile interval of `statistic(*columns)`.

    statistic: of all columns of all groups, in order.
    groups: each some columns (n, …) of the same images, drawn together; groups are drawn apart from each other.
    replications: how often images are drawn.
    level: share of the replications inside the interval.
    seed: of the drawing.
    """
    if not 0 < level < 1 or replications < 2:
        raise ConfigError(f"level {level} with {replications} replications; expected a share, and at least two.")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(replications):
        rows = [torch.randint(len(g[0]), (len(g[0]),), generator=generator) for g in groups]
        drawn = [column[row] for columns, row in zip(groups, rows, strict=True) for column in columns]
        values.append(statistic(*drawn))
    return percentiles(torch.tensor(values, dtype=torch.float64), level)


def percentiles(values: Tensor, level: float = 0.95) -> Interval:
    """The interval of replications (r,). `values` are those; `level` is the share inside, 0.95 by default."""
    outside = (1 - level) / 2
    low, high = torch.quantile(values, torch.tensor([outside, 1 - outside], dtype=values.dtype)).tolist()
    return Interval(low, high)


def multiplicities(n: int, *, replications: int = 200, seed: int = 0) -> Tensor:
    """(r, n) float32: how often each image is drawn in each replication; means are then products of matrices."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(n, (n,), generator=generator).bincount(minlength=n) for _ in range(replications)]
    return torch.stack(rows).float()
