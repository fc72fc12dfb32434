"""Whether a search in bfloat16 pays: measured on this machine, with this model and batch, before the search.

A search in bfloat16 is followed by a shorter one in float32. It pays where a pass in bfloat16 takes less than half the
time, which large models on a GPU do; small ones wait for the host, whatever the precision.      B images (B, C, H, W)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitruvius.attacks._losses import CE
from vitruvius.attacks._models import loss_and_grad

logger = logging.getLogger(__name__)

PAYS_FROM = 2.0  # times that a pass in bfloat16 must be faster
WARM_UP = 17  # passes before the clock: after sixteen a pass is recorded as a CUDA graph
PASSES = 5
Clock = Callable[[], float]


_known: WeakKeyDictionary[nn.Module, dict[torch.Size, bool]] = WeakKeyDictionary()  # so that a model is measured once


def bfloat16_pays(model: nn.Module, exact: nn.Module, view: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether gradients of `view` are so much faster than those of `exact` that a search on it pays.

    model: what the two are views of; it is measured once for every shape of a batch. exact, view: in float32 and in
    bfloat16, as they will be searched. x (B, C, H, W) and y (B,): images and labels of a batch; nothing but the time of
    their gradients is used.
    """
    answers = _known.setdefault(model, {})
    if x.shape not in answers:
        answers[x.shape] = _measure(exact, view, x, y)
    return answers[x.shape]


def _measure(exact: nn.Module, view: nn.Module, x: Tensor, y: Tensor) -> bool:
    seconds = [pass_seconds(one, x, y) for one in (exact, view)]
    pays = seconds[0] >= PAYS_FROM * seconds[1]
    chosen = "exact"
    if pays:
        chosen = "fast"
    logger.debug(
        "precision=auto: %s; a gradient of %d images takes %.2f ms in float32, %.2f in bfloat16",
        chosen, len(x), 1e3 * seconds[0], 1e3 * seconds[1],
    )  # fmt: skip
    return pays


def pass_seconds(model: nn.Module, x: Tensor, y: Tensor, clock: Clock = time.perf_counter) -> float:
    """Seconds of a gradient, the fastest of a few after warming up.

    model: returns logits (B, K). x, y: a batch. clock: gives seconds; by default the wall clock.
    """
    fastest = torch.inf
    for number in range(WARM_UP + PASSES):
        _wait(x)
        begun = clock()
        loss_and_grad(model, x, lambda logits: CE(logits, y))
        _wait(x)
        if number >= WARM_UP:
            fastest = min(fastest, clock() - begun)
    return fastest


def _wait(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.get_device_module(x.device).synchronize(x.device)
