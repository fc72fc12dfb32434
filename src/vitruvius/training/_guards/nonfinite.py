"""A non-finite loss: found with its batch and the ids of its images, reported and kept, or left out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitruvius._errors import Diverged
from vitruvius._processes import Process

REMEDY = "Lower train.lr, lengthen train.warmup_epochs, set train.clip_grad, or use train.precision=bf16."


@dataclass
class LossWatch:
    """The losses of the batches since the last look, on the device, and the ids of their images, on the CPU."""

    process: Process
    numbers: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)

    def add(self, number: int, loss: Tensor, ids: Tensor) -> None:
        """Nothing waits for the device."""
        self.numbers.append(number)
        self.losses.append(loss.detach().float())
        self.ids.append(ids)

    def find(self) -> dict[str, Any] | None:
        """The first batch, of any process, whose loss is not finite; and a new start. Waits for the device."""
        found = self._first()
        self.numbers, self.losses, self.ids = [], [], []
        if not self.process.any(found is not None):
            return None
        everywhere = [one for one in self.process.gather(found) if one is not None]
        return min(everywhere, key=lambda one: (one["batch"], one["rank"]))

    def _first(self) -> dict[str, Any] | None:
        """The first batch of this process whose loss is not finite."""
        if not self.losses:
            return None
        losses = torch.stack(self.losses)
        bad = (~torch.isfinite(losses)).nonzero()[:, 0].tolist()
        if not bad:
            return None
        return {
            "batch": self.numbers[bad[0]],
            "loss": str(float(losses[bad[0]])),
            "rank": self.process.rank,
            "ids": self.ids[bad[0]].tolist(),
        }


def is_finite(process: Process, loss: Tensor) -> bool:
    """Whether this batch's loss is a number on every process. Waits for the device."""
    return not process.any(not math.isfinite(float(loss.detach())))


def all_finite(process: Process, tensors: list[Tensor]) -> bool:
    """Whether all these tensors (weights, or gradients) of every process are finite. Waits for the device."""
    own = [local_part(tensor) for tensor in tensors]
    sizes = torch.stack([tensor.abs().amax().float() for tensor in own if tensor.numel()])
    return not process.any(not bool(torch.isfinite(sizes).all()))


def error_for(found: dict[str, Any], epoch: int) -> Diverged:
    """The error that stops a run."""
    ids = found["ids"]
    shown = ", ".join(map(str, ids[:8]))
    if len(ids) > 8:
        shown += f", … ({len(ids)} in all)"
    return Diverged(
        f"the training loss is {found['loss']} at batch {found['batch'] + 1} of epoch {epoch + 1} (images {shown}). "
        f"nonfinite.json and nonfinite.pt in the run folder keep the batch and the state. {REMEDY}"
    )


def as_json(found: dict[str, Any], epoch: int, updates: int) -> str:
    return json.dumps({"epoch": epoch, "updates": updates, **found}) + "\n"


def local_part(tensor: Tensor) -> Tensor:
    """A process's own part of a tensor that may be sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
