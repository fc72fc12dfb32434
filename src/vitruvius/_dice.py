"""Random numbers that belong to images: a hash of (seed, image id, stream, step, position) and of nothing else.

Counter-based (splitmix64, Steele et al. 2014) in int64 tensor arithmetic, so the numbers of an image are the same in
every batch, process and device. B images.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


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
        return shift(self._bits(stream, shape, step), 40).float() * 2.0**-24

    def normal(self, stream: str, shape: Sequence[int], step: int | Tensor = 0) -> Tensor:
        """(B, *shape) float32 standard normal numbers, by Box and Muller."""
        radius = (-2 * (1 - self.uniform(f"{stream}/radius", shape, step)).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(f"{stream}/angle", shape, step)).cos()

    def signs(self, stream: str, shape: Sequence[int], step: int | Tensor = 0) -> Tensor:
        """(B, *shape) float32 of −1 and 1."""
        return 1 - 2 * shift(self._bits(stream, shape, step), 63).float()

    def integers(self, stream: str, high: int | Tensor, shape: Sequence[int] = (), step: int | Tensor = 0) -> Tensor:
        """(B, *shape) int64 in 0 … high − 1; `high` is a number or broadcasts to the result."""
        return shift(self._bits(stream, shape, step), 33) % high

    def _bits(self, stream: str, shape: Sequence[int], step: int | Tensor) -> Tensor:
        key = mix(self.ids + signed((self.seed + 1) * GOLDEN))  # (B,)
        key = mix(key + signed(zlib.crc32(f"{self.owner}/{stream}".encode()) * GOLDEN))
        key = mix(key + step)
        position = torch.arange(1, math.prod(shape) + 1, device=key.device) * GOLDEN
        return mix(key[:, None] + position).view(len(key), *shape)


def image_ids(x: Tensor) -> Tensor:
    """(B,) int64 ids from the pixels themselves, for callers that have no data-set index: equal images, equal ids.

    `x` is (B, ...).
    """
    bits = (x.float() + 0.0).flatten(1).view(torch.int32).long()
    weights = mix(torch.arange(bits.shape[1], device=x.device)) | 1
    return mix((bits * weights).sum(1))


def mix(z: Tensor) -> Tensor:
    """What splitmix64 makes of a state; int64 arithmetic wraps around as it should."""
    z = (z ^ shift(z, 30)) * _MIX_1
    z = (z ^ shift(z, 27)) * _MIX_2
    return z ^ shift(z, 31)


def shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift; int64 tensors shift arithmetically."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def signed(number: int) -> int:
    """The int64 that equals a number of any size modulo 2⁶⁴."""
    return (number + 2**63) % 2**64 - 2**63
