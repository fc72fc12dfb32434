"""Detection of images from outside: how well a score tells them from images of the classes a model knows.

Scores are high for images from outside: −max softmax (Hendrycks & Gimpel 2017, arXiv:1610.02136), −max logit
(Hendrycks et al. 2022, arXiv:1911.11132), −logsumexp of the logits, the energy (Liu et al. 2020, arXiv:2010.03759).
r replications, n images of both kinds, t distinct thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._checks import check_columns
from vitruvius.evaluation.metrics.bootstrap import Interval, multiplicities, percentiles

SCORES = {"max softmax": "confidence", "max logit": "max_logit", "energy": "energy"}  # score → column of a ledger


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Shares in [0, 1]."""

    auroc: float
    aupr_out: float  # images from outside are what is looked for
    aupr_in: float  # images of known classes are
    fpr95: float  # known images taken for outside ones when 95 % of those are found


def detect(outside: Tensor, inside: Tensor) -> Detection:
    """From the scores of images from outside and of known ones; a higher score means outside."""
    once = (torch.ones(1, len(scores)) for scores in (outside, inside))
    return Detection(**{name: float(value) for name, value in weighted(outside, inside, *once).items()})


def fpr_as_released(outside: Tensor, inside: Tensor, *, recall: float = 0.95) -> float:
    """FPR95 as the papers' released code has it: at the lowest threshold whose recall is nearest, be it below."""
    (out,), (known,) = check_columns(outside=outside), check_columns(inside=inside)
    found, false = _above(out, known, torch.ones(1, len(out)), torch.ones(1, len(known)))  # falling thresholds
    tpr, fpr = found[0].double() / len(out), false[0].double() / len(known)
    till = int((tpr == 1).double().argmax()) + 1  # the first threshold that finds all
    distance = (tpr[:till] - recall).abs()
    return float(fpr[:till][distance == distance.min()][-1])


def detection_intervals(outside: Tensor, inside: Tensor, *, replications: int = 200) -> dict[str, Interval]:
    """The 95 % interval of every number that `detect` gives; both kinds of images are drawn apart from each other."""
    times = [
        multiplicities(len(scores), replications=replications, seed=place)
        for place, scores in enumerate((outside, inside))
    ]
    return {name: percentiles(values) for name, values in weighted(outside, inside, *times).items()}


def weighted(outside: Tensor, inside: Tensor, out_times: Tensor, in_times: Tensor) -> dict[str, Tensor]:
    """(r,) of every number of `Detection`, each image counted (r, n) times."""
    (out,), (known,) = check_columns(outside=outside), check_columns(inside=inside)
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
