"""Losses of an epoch: their means for the log, and the first batch whose loss is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitruvius._processes import Process


class Means:
    """Means of what a task reports over an epoch, over all images of all processes; they survive a stop bit for bit.

    Sums of recent batches lie on the device; `fold` adds them to those that are kept as numbers. It is asked for after
    fixed batches, so that the sums do not depend on when somebody reads them.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._recent: dict[str, Tensor] = {}
        self._sums: dict[str, float] = {}

    def add(self, numbers: dict[str, Tensor], images: float) -> None:
        """Means of one batch; nothing waits for the device."""
        numbers = {**numbers, "images": torch.ones_like(numbers["loss"])}
        for name, value in numbers.items():
            self._recent[name] = self._recent.get(name, torch.zeros_like(value)) + value * images

    def read(self, *, fold: bool = False) -> dict[str, float]:
        """The means so far and the number of `images`, the same on every process; waits for the device."""
        sums = dict(self._sums)
        if self._recent:
            recent = self.process.total(torch.stack(list(self._recent.values()))).tolist()
            for name, value in zip(self._recent, recent, strict=True):
                sums[name] = sums.get(name, 0.0) + value
        if fold:
            self._sums, self._recent = sums, {}
        images = sums.get("images", 0.0)
        if not images:
            return {}
        return {name: value / images for name, value in sums.items()} | {"images": images}

    def state(self) -> dict[str, Any]:
        """To be saved; the recent sums of every process apart, so that they are added up as they would have been."""
        recent = {name: value.cpu() for name, value in self._recent.items()}
        return {"sums": dict(self._sums), "recent": self.process.gather(recent)}

    def load(self, state: dict[str, Any]) -> None:
        recent = state["recent"][self.process.rank]
        self._recent = {name: value.to(self.process.device) for name, value in recent.items()}
        self._sums = dict(state["sums"])


@dataclass
class LossWatch:
    """The losses of the batches since the last look, on the device, and the ids of their images, on the CPU."""

    process: Process
    batches: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # number, loss, ids

    def add(self, number: int, loss: Tensor, ids: Tensor) -> None:
        """Nothing waits for the device."""
        self.batches.append((number, loss.detach().float(), ids))

    def find(self) -> dict[str, Any] | None:
        """The first batch, of any process, whose loss is not finite; all are forgotten. Waits for the device."""
        first = None
        finite = torch.stack([loss for _, loss, _ in self.batches]).isfinite().tolist() if self.batches else []
        if not all(finite):
            number, loss, ids = self.batches[finite.index(False)]
            first = {"batch": number, "loss": str(float(loss)), "rank": self.process.rank, "ids": ids.tolist()}
        self.batches = []
        if not self.process.any(first is not None):
            return None
        everywhere = [batch for batch in self.process.gather(first) if batch is not None]
        return min(everywhere, key=lambda batch: (batch["batch"], batch["rank"]))


def is_finite(process: Process, loss: Tensor) -> bool:
    """Whether this batch's loss is a number on every process. Waits for the device."""
    return not process.any(not math.isfinite(float(loss.detach())))


def all_finite(process: Process, tensors: list[Tensor]) -> bool:
    """Whether all these tensors (weights, or gradients, perhaps sharded) of every process are finite."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    sizes = torch.stack([tensor.abs().amax().float() for tensor in local if tensor.numel()])
    return not process.any(not bool(torch.isfinite(sizes).all()))
