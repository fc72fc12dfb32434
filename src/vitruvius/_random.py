"""Random numbers as functions of what they are for, so that nothing of them has to be saved.

Those of an image are counted: splitmix64 of (seed, owner or epoch, image, …) in int64 tensor arithmetic, the same in
every batch, process and device (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"). Those that
layers, attacks, PIL and timm draw from global generators follow seeds that are set for every batch or image.

B images of a batch
"""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
CPU = torch.device("cpu")
BLOCK = 2**14  # numbers made at a time on a CPU, so that they stay in its cache

Words = TypeVar("Words", Tensor, NDArray[np.int64])  # NumPy's on a CPU, where its calls cost a third of torch's


# attacks and corruptions


@dataclass(frozen=True)
class Dice:
    """The random numbers of B images. A stream names what they are for; a step counts within a stream.

    `stream` is a name, `shape` what is drawn for each image, `step` a number for all images or (B,) (default 0).
    """

    ids: Tensor  # (B,) int64
    seed: int = 0
    owner: str = ""  # who throws: two attacks of one seed do not share their numbers

    def __getitem__(self, rows: Tensor) -> Dice:
        """The dice of some of the images."""
        return Dice(self.ids[rows], self.seed, self.owner)

    def uniform(self, stream: str, shape: Sequence[int], step: int | Tensor = 0) -> Tensor:
        """(B, *shape) float32 in [0, 1), multiples of 2⁻²⁴."""
        return self._draw(stream, shape, step, 24, torch.float32).mul_(2.0**-24)

    def normal(self, stream: str, shape: Sequence[int], step: int | Tensor = 0) -> Tensor:
        """(B, *shape) float32 standard normal numbers, by Box and Muller."""
        radius = (-2 * (1 - self.uniform(f"{stream}/radius", shape, step)).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(f"{stream}/angle", shape, step)).cos()

    def signs(self, stream: str, shape: Sequence[int], step: int | Tensor = 0) -> Tensor:
        """(B, *shape) float32 of −1 and 1."""
        return self._draw(stream, shape, step, 1, torch.float32).mul_(-2).add_(1)

    def integers(self, stream: str, high: int | Tensor, shape: Sequence[int] = (), step: int | Tensor = 0) -> Tensor:
        """(B, *shape) int64 in 0 … high − 1; `high` is a number or broadcasts to the result."""
        return self._draw(stream, shape, step, 31, torch.int64) % high

    def _draw(self, stream: str, shape: Sequence[int], step: int | Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        """(B, *shape) whole numbers of so many bits, 31 at most."""
        number, device = math.prod(shape), self.ids.device
        on_cpu = device.type == "cpu"
        key: Any = self.ids.numpy() if on_cpu else self.ids
        key = _mix(key + _signed((self.seed + 1) * GOLDEN))
        key = _mix(key + _signed(zlib.crc32(f"{self.owner}/{stream}".encode()) * GOLDEN))
        key = _mix(key + (step.numpy() if on_cpu and isinstance(step, Tensor) else step))
        if not on_cpu:
            position = torch.arange(1, number + 1, device=device).mul_(GOLDEN)
            return _shift(_stir(key[:, None] + position), 64 - bits).to(dtype).view(len(key), *shape)
        positions = np.arange(1, number + 1, dtype=np.int64) * GOLDEN
        drawn = torch.empty(len(key), number, dtype=dtype)
        filled, width = drawn.numpy(), BLOCK // max(len(key), 1) + 1
        for first in range(0, number, width):
            part = slice(first, first + width)
            filled[:, part] = _shift(_stir(key[:, None] + positions[part]), 64 - bits)
        return drawn.view(len(key), *shape)


def id_of(name: str) -> int:
    """An int64 id that belongs to an image by its `class/file`, wherever the folder lies and whatever lies beside."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def image_ids(x: Tensor) -> Tensor:
    """(B,) int64 ids from the pixels x (B, …), for callers that have no data-set index: equal images, equal ids."""
    number = math.prod(x.shape[1:])
    if x.device.type != "cpu":
        bits = (x.float() + 0.0).flatten(1).view(torch.int32).long()
        return _mix(bits.mul_(_weights(number, x.device)).sum(1))
    pixels = x.detach().float().numpy() + np.float32(0)  # −0 is 0
    weights = _kept_weights(number, CPU).numpy()
    return torch.from_numpy(_mix(np.einsum("bp,p->b", pixels.reshape(len(x), number).view(np.int32), weights)))


def _weights(number: int, device: torch.device) -> Tensor:
    """(number,) odd numbers."""
    return _mix(torch.arange(number, device=device)) | 1


_kept_weights = lru_cache(maxsize=4)(_weights)


# order and augmentation


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
        key = _fold(key, torch.full_like(key, _signed(number)))
    return int(key) & ((1 << 63) - 1)


def uniform(keys: Tensor, stream: int, count: int) -> Tensor:
    """(B, count) float32 in [0, 1); different streams of one key are independent."""
    start = _fold(keys, torch.full_like(keys, stream))[:, None]
    steps = torch.arange(1, count + 1, device=keys.device) * GOLDEN
    return _shift(_stir(start + steps), 40).float().mul_(2.0**-24)


# global generators


@contextmanager
def preserve_rng(device: torch.device = CPU) -> Iterator[None]:
    """Leave the caller's random streams (Python's, numpy's, torch's) as they were."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 (timm draws from numpy's global state)
    fork = torch.random.fork_rng
    try:
        with fork([]) if device.type == "cpu" else fork([device], device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002


@contextmanager
def seeded(key: int, *, restore: bool = True) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators as if seeded by `key`; as they were afterwards."""
    bits = key & ((1 << 64) - 1)
    with preserve_rng() if restore else nullcontext():
        random.seed(bits)
        np.random.seed([bits & 0xFFFFFFFF, bits >> 32])  # noqa: NPY002
        torch.default_generator.manual_seed(bits)
        yield


def batch_seed(*, seed: int, epoch: int, batch: int, rank: int = 0) -> int:
    """The seed of torch's generators for a batch of a process."""
    return _batch_seeds(seed, epoch, batch, rank)[0]


def seed_batch(*, seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """A stream for every batch and process, the same in every run. `torch.manual_seed` would take a millisecond."""
    number, for_python, for_numpy = _batch_seeds(seed, epoch, batch, rank)
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
    random.seed(for_python)
    np.random.seed(for_numpy)  # noqa: NPY002


def _batch_seeds(seed: int, epoch: int, batch: int, rank: int) -> tuple[int, int, int]:
    """Seeds for torch, Python and numpy."""
    mixed = np.random.SeedSequence([seed % 2**64, epoch, batch, rank]).generate_state(4)
    return (int(mixed[0]) << 31) ^ int(mixed[1]), int(mixed[2]), int(mixed[3])


class BatchDraws:
    """Keys for the random numbers of a batch's images, the same however many processes share the batch.

    Alone, they come from torch's global generator, which the loop seeds for every batch. Of several processes each
    draws for the whole batch and keeps the rows that are its own: images are dealt round-robin.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._generator: torch.Generator | None = None

    def begin(self, seed: int, device: torch.device) -> None:
        """Before a batch: the seed that a process alone would have."""
        if self.world_size > 1:
            self._generator = torch.Generator(device).manual_seed(seed)

    def keys(self, x: Tensor) -> Tensor:
        """(B,) a number for each image of this process's part of the batch."""
        rows = len(x) * self.world_size
        drawn = torch.randint(2**62, (rows,), device=x.device, generator=self._generator)
        return drawn[self.rank :: self.world_size]


# splitmix64; int64 arithmetic wraps around as it should


def _mix(z: Words) -> Words:
    """What splitmix64 makes of a state. In place where it can be: new memory costs more than the arithmetic."""
    z = _stir(z)
    mixed = _shift(z, 31)
    mixed ^= z
    return mixed


def _stir(z: Words) -> Words:
    """All but the last step of splitmix64, which leaves the highest 31 bits as they are."""
    for by, factor in ((30, _MIX_1), (27, _MIX_2)):
        stirred = _shift(z, by)
        stirred ^= z
        stirred *= factor
        z = stirred
    return z


def _fold(key: Tensor, value: Tensor) -> Tensor:
    return _mix((key ^ _mix(value + GOLDEN)) + GOLDEN)


def _shift(z: Words, by: int) -> Words:
    """Logical right shift; int64 shifts arithmetically."""
    if isinstance(z, Tensor):
        return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
    return (z.view(np.uint64) >> np.uint64(by)).view(np.int64)


def _signed(number: int) -> int:
    """The int64 that equals a number of any size modulo 2⁶⁴."""
    return (number + 2**63) % 2**64 - 2**63
