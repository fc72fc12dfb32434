"""Modes of a model for a while: all in eval, or batch statistics at rest; every module gets back what it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside; outside each in the mode it had, also where they differ."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Batch norms use the statistics of the batch, as in training, and do not add them to their running ones."""
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
