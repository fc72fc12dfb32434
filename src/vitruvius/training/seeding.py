"""Seeds of the global random streams that layers, attacks and timm draw from (dropout, stochastic depth, starts).

They are a function of seed, epoch, batch and process. Nothing of it has to be saved: a run that goes on in the
middle of an epoch draws the same numbers as one that never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Leave the caller's random streams (Python's, numpy's, torch's) as they were."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 (timm draws from numpy's global state)
    fork = (
        torch.random.fork_rng([]) if device.type == "cpu" else torch.random.fork_rng([device], device_type=device.type)
    )
    try:
        with fork:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002


def batch_seed(*, seed: int, epoch: int, batch: int, rank: int = 0) -> int:
    """The seed of torch's generators for a batch of a process."""
    return _mixed(seed, epoch, batch, rank)[0]


def seed_batch(*, seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """A stream for every batch and process, the same in every run. `torch.manual_seed` would take a millisecond."""
    number, for_python, for_numpy = _mixed(seed, epoch, batch, rank)
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
    random.seed(for_python)
    np.random.seed(for_numpy)  # noqa: NPY002


def _mixed(seed: int, epoch: int, batch: int, rank: int) -> tuple[int, int, int]:
    """Seeds for torch, Python and numpy."""
    mixed = np.random.SeedSequence([seed % 2**64, epoch, batch, rank]).generate_state(4)
    return (int(mixed[0]) << 31) ^ int(mixed[1]), int(mixed[2]), int(mixed[3])
