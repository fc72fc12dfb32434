"""A model whose passes are recorded once for a number of images and replayed (CUDA graphs): nobody waits for the host.

A search asks the same model thousands of times, and a small model answers faster than Python can ask: launching a
pass of DeiT-Tiny takes longer than computing it in bfloat16. Numbers of images are rounded up to a few sizes, and a
size is recorded when it has come up some times.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from vitruvius.attacks._models import Around
from vitruvius.attacks._recorder import Recorder
from vitruvius.attacks._tape import Record, Replay, Tape, try_tape

PAYS = 16  # calls of one size before it is recorded: recording costs about five
PARTS = 8  # sizes up to the largest batch

Kind = tuple[int, bool, torch.Size, torch.dtype]  # images, with gradients, shape and type of one


class Replayed(nn.Module, Around):
    """`inner` with recorded passes. `room`: the most images in a batch."""

    def __init__(self, inner: nn.Module, room: int, record: Record | None = None) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.training, self.room = inner.training, room
        self.record = record or Recorder()
        self.calls: Counter[Kind] = Counter()
        self.tapes: dict[Kind, Tape] = {}

    def forward(self, x: Tensor) -> Tensor:
        tape = self._tape(x, steep=torch.is_grad_enabled() and x.requires_grad)
        if tape is None:
            logits: Tensor = self.inner(x)
            return logits
        if not tape.steep:
            return tape.look(x)
        replayed: Tensor = Replay.apply(x, tape)
        return replayed

    def _tape(self, x: Tensor, *, steep: bool) -> Tape | None:
        size = rounded(len(x), self.room)
        if size is None:
            return None
        key = (size, steep, x.shape[1:], x.dtype)
        self.calls[key] += 1
        if self.calls[key] == PAYS:
            tape = try_tape(self.inner, x, size, steep, self.record)
            if tape is not None:
                self.tapes[key] = tape
        return self.tapes.get(key)


def replayed(model: nn.Module, x: Tensor, room: int) -> nn.Module:
    """The model with recorded passes where there are CUDA graphs; elsewhere the model."""
    return Replayed(model, room) if x.is_cuda and torch.version.cuda else model


def rounded(images: int, room: int) -> int | None:
    """The size that so many images are padded to: an eighth of the room or more of them, below that a power of two."""
    part = max(room // PARTS, 1)
    if not 0 < images <= room:
        return None
    return min(-(-images // part) * part, room) if images > part // 2 else 1 << (images - 1).bit_length()
