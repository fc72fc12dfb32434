"""Augmentation of several batches at a time, one step ahead of what is used.

A policy such as RandAugment is some two thousand small operations for a batch, however many images it holds. Where an
accelerator computes, the host needs longer to start them than a small model needs to train on the batch. So a chunk of
batches is augmented in one go, on a stream of its own, while the chunk before it is in use. Numbers are drawn by each
image's key, so the result does not depend on how batches are grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MOST_BATCHES = 16  # in a chunk
MEMORY_SHARE = 64  # a chunk of pixels takes at most this fraction of the device's memory


def batches_in_chunk(device: torch.device, batch_bytes: int) -> int:
    """How many batches of float32 pixels are augmented together: one on a CPU, whose caches are small."""
    if not has_streams(device):
        return 1
    memory = torch.get_device_module(device).get_device_properties(device).total_memory
    return max(1, min(MOST_BATCHES, memory // MEMORY_SHARE // max(1, batch_bytes)))


def has_streams(device: torch.device) -> bool:
    """Whether work on the device can go on beside other work there."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "stream")


class Ahead:
    """Makes one chunk before it is asked for, beside the work of the current stream; on a CPU, when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = has_streams(device)
        self.stream: torch.Stream | None = None
        self.ready: tuple[Hashable, Tensor] | None = None

    def prepare(self, name: Hashable, make: Callable[[], Tensor]) -> None:
        """Begin the chunk `name`, which `make` computes; nothing happens on a CPU, or if it has begun already."""
        if self.streams and (self.ready is None or self.ready[0] != name):
            self.ready = name, self._beside(make)

    def take(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The chunk `name`, prepared or computed now by `make`."""
        if not self.streams:
            return make()
        self.prepare(name, make)
        assert self.ready is not None
        _, pixels = self.ready
        self.ready = None
        current = torch.accelerator.current_stream(self.device)
        assert self.stream is not None
        current.wait_stream(self.stream)
        pixels.record_stream(current)
        return pixels

    def _beside(self, make: Callable[[], Tensor]) -> Tensor:
        module = torch.get_device_module(self.device)
        if self.stream is None:
            self.stream = module.Stream(self.device)
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))  # the images are there
        with module.stream(self.stream):
            return make()
