"""Bootstrap intervals of detection: scores are sorted once, images drawn again are counted by how often they come.

r replications, n images of both kinds, t distinct thresholds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.evaluation.metrics._checks import checked
from vitruvius.evaluation.metrics.bootstrap import Interval, multiplicities, percentiles


def detection_intervals(
    outside: Tensor, inside: Tensor, *, replications: int = 200, level: float = 0.95, seed: int = 0
) -> dict[str, Interval]:
    """The interval of every number of `Detection`; both kinds of images are drawn apart from each other.

    outside: (n,) scores of images from outside, where higher means outside.
    inside: (m,) scores of known images.
    replications: how often images are drawn.
    level: share of the replications inside the interval.
    seed: of the drawing.
    """
    times = [
        multiplicities(len(scores), replications=replications, seed=seed + place)
        for place, scores in enumerate((outside, inside))
    ]
    return {name: percentiles(values, level) for name, values in weighted(outside, inside, *times).items()}


def weighted(outside: Tensor, inside: Tensor, out_times: Tensor, in_times: Tensor) -> dict[str, Tensor]:
    """(r,) of every number of `Detection`, each image counted (r, n) times.

    `outside` (n,) and `inside` (m,) are scores; `out_times` (r, n) and `in_times` (r, m) how often each image is drawn.
    """
    (out,), (known,) = checked(outside=outside), checked(inside=inside)
    found, false = _above(out, known, out_times.double(), in_times.double())  # (r, t), thresholds falling
    kept, lost = _above(-known, -out, in_times.double(), out_times.double())  # the other way round
    steps = false.diff(dim=1, prepend=torch.zeros_like(false[:, :1]))
    before = found - found.diff(dim=1, prepend=torch.zeros_like(found[:, :1])) / 2  # trapezoids: ties count half
    positives, negatives = found[:, -1], false[:, -1]
    first = (found >= (0.95 - 1e-12) * positives[:, None]).double().argmax(1, keepdim=True)
    return {
        "auroc": (steps * before).sum(1) / (positives * negatives),
        "aupr_out": _precision(found, false),
        "aupr_in": _precision(kept, lost),
        "fpr95": false.gather(1, first)[:, 0] / negatives,
    }


def _above(high: Tensor, low: Tensor, high_times: Tensor, low_times: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each kind reach each distinct threshold, (r, t) each."""
    scores, order = torch.cat([high, low]).sort(descending=True)
    last = torch.cat([scores.diff() != 0, torch.ones(1, dtype=torch.bool)])
    nothing = torch.zeros_like
    hits = torch.cat([high_times, nothing(low_times)], 1)[:, order].cumsum(1)[:, last]
    misses = torch.cat([nothing(high_times), low_times], 1)[:, order].cumsum(1)[:, last]
    return hits, misses


def _precision(hits: Tensor, misses: Tensor) -> Tensor:
    """Average precision: Σ Δrecall · precision."""
    gained = hits.diff(dim=1, prepend=torch.zeros_like(hits[:, :1])) / hits[:, -1:]
    return (gained * hits / (hits + misses).clamp(min=1)).sum(1)
