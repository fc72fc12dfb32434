"""Means of what a task reports over an epoch, over all images of all processes; they survive a stop bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitruvius._processes import Process


class Means:
    """Sums on the device since the last look, and sums as numbers before it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._recent: dict[str, Tensor] = {}
        self._sums: dict[str, float] = {}

    @property
    def images(self) -> float:
        """Images of all processes, up to the last look."""
        return self._sums.get("images", 0.0)

    def add(self, numbers: dict[str, Tensor], images: float) -> None:
        """Means of one batch; nothing waits for the device."""
        numbers = {**numbers, "images": torch.ones_like(numbers["loss"])}
        for name, value in numbers.items():
            self._recent[name] = self._recent.get(name, torch.zeros_like(value)) + value * images

    def read(self) -> dict[str, float]:
        """The means so far; the same on every process. Waits for the device."""
        if self._recent:
            recent = self.process.total(torch.stack(list(self._recent.values()))).tolist()
            for name, value in zip(self._recent, recent, strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._recent = {}
        if not self.images:
            return {}
        return {name: value / self.images for name, value in self._sums.items() if name != "images"}

    def state(self) -> dict[str, Any]:
        """To be saved; the recent sums of every process apart, so that they are added up as they would have been."""
        recent = {name: value.cpu() for name, value in self._recent.items()}
        return {"sums": dict(self._sums), "recent": self.process.gather(recent)}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        mine = state["recent"][self.process.rank]
        self._recent = {name: value.to(self.process.device) for name, value in mine.items()}
        self._sums = dict(state["sums"])
