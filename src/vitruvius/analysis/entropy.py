"""Entropy of attention: how many keys a query looks at. B batch, H heads, N queries, M keys."""

from __future__ import annotations

import math

import torch

from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("entropy")
def entropy(heads: Heads, site: Site | None = None, attended: Attended | None = None) -> Statistics:
    """Entropy of each query's attention: in nats, as a share of the largest possible, and as a number of keys.

    Of a map that is not a distribution (negative weights, sums other than 1) the shares |weight| / Σ |weights| count.
    """
    weights = (attended or Attended(precise(heads))).shares()
    nats = torch.special.entr(weights).sum(-1)  # (B, H, N)
    return {
        "relative": nats.mean(-1) / math.log(max(heads.k.shape[-2], 2)),
        "nats": nats.mean(-1),
        "effective_keys": nats.exp().mean(-1),
        "largest_weight": weights.amax(-1).mean(-1),
    }
