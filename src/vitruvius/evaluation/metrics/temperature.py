"""Temperature scaling: logits divided by one number T that makes the likelihood of held-out labels largest.

Guo et al. 2017, arXiv:1706.04599. In β = 1/T the loss is convex, so the sign of its slope leads to the one minimum.
B images, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._errors import DataError
from vitruvius._progress import Progress, no_progress

logger = logging.getLogger(__name__)


def fit_temperature(logits: Tensor, labels: Tensor, *, low: float = 0.2, high: float = 5.0) -> float:
    """The T in [low, high] of least cross-entropy, by bisection; fit it on images that neither trained nor test.

    `logits` (n, K) and `labels` (n,) are of the same images; `low` and `high` are 0.2 and 5 by default. One that stops
    at an end of them is logged as a warning: the best one lies outside.
    """
    least, most = low, high
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise DataError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}, expected (n, K) and (n).")
    if not torch.isfinite(logits).all():
        raise DataError("some logits are not finite; the model may be damaged.")
    z = logits.detach().cpu().double()
    own = z.gather(1, labels.cpu()[:, None].long())[:, 0]  # (n,) logit of the label
    while high - low > 1e-7:
        middle = (low + high) / 2
        expected = ((z / middle).softmax(-1) * z).sum(-1)  # (n,) d loss / dβ = expected − own
        if float((expected - own).mean()) > 0:  # a colder model would be too sure: T must grow
            low = middle
        else:
            high = middle
    found = (low + high) / 2
    if min(found - least, most - found) < 1e-6:
        logger.warning("the temperature stops at %g, the end of its range: the best one lies outside.", found)
    return found


@torch.no_grad()
def collect_logits(
    model: nn.Module, loader: Iterable[Any], *, progress: Progress = no_progress
) -> tuple[Tensor, Tensor]:
    """(logits (n, K), labels (n)) of every image of a loader, on the CPU."""
    device = device_of(model)
    rows = []
    done = 0
    for batch in loader:
        rows.append((model(batch[0].to(device)).float().cpu(), batch[1].cpu()))
        done += len(batch[1])
        progress(done, getattr(loader, "num_images", None))
    if not rows:
        raise DataError("the loader yielded no images; there is nothing to fit a temperature on.")
    logits, labels = (torch.cat(column) for column in zip(*rows, strict=True))
    return logits, labels
