"""Random numbers by counting: splitmix64 of (seed, epoch, image, repeat), equal on every device and in every order.

Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".   B images of a batch
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vitruvius._dice import GOLDEN, mix, shift, signed


def image_keys(ids: Tensor, repeats: Tensor, *, seed: int, epoch: int) -> Tensor:
    """One 64-bit key for each image (B,): all that its augmentation depends on."""
    return _fold(_fold(torch.full_like(ids, seed_of(seed, epoch)), ids), repeats)


def split_keys(keys: Tensor, split: int) -> Tensor:
    """Other keys (B,) for another view of the same images."""
    return _fold(keys, torch.full_like(keys, split))


def seed_of(*numbers: int) -> int:
    """One non-negative 63-bit seed from several numbers; close inputs give unrelated seeds."""
    key = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        key = _fold(key, torch.full_like(key, signed(number)))
    return int(key) & ((1 << 63) - 1)


def uniform(keys: Tensor, stream: int, count: int) -> Tensor:
    """(B, count) numbers in [0, 1); different streams of one key are independent."""
    start = _fold(keys, torch.full_like(keys, stream))[:, None]
    steps = torch.arange(count, device=keys.device) * GOLDEN
    return shift(_splitmix(start + steps), 40).float() / (1 << 24)


@contextlib.contextmanager
def seeded(key: int, *, restore: bool = True) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators as if seeded by `key`; as they were afterwards."""
    before = _states() if restore else None
    bits = key & ((1 << 64) - 1)
    random.seed(bits)
    np.random.seed([bits & 0xFFFFFFFF, bits >> 32])  # noqa: NPY002 (timm draws from the global generator)
    torch.default_generator.manual_seed(bits)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])


def _states() -> tuple[tuple[object, ...], dict[str, object], Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002


def _fold(key: Tensor, value: Tensor) -> Tensor:
    return _splitmix(key ^ _splitmix(value))


def _splitmix(x: Tensor) -> Tensor:
    """The output of splitmix64 in state x."""
    return mix(x + GOLDEN)
