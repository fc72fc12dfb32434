"""A siege: one attack after the other on the images that still stand, and a record of who brought each one down.

An image counts as fallen only if its x' fools the float32 model; what a faster search claims is always checked. What
stands after it is searched again in float32: shortly, from the worst point known, and in full if that fells more than
a hundredth of the images, for then the fast search is not to be trusted on this model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius.attacks._base import Attack, Threat, disturb
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._outcome import CLEAN, STANDING, Outcome, Stage
from vitruvius.attacks._random import Dice
from vitruvius.attacks._targets import clean_logits

TRUST = 0.01  # share of images the short search may fell before the full one must follow


class Siege:
    """The images, where they stand, and what has been tried."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, batch_size: int | None) -> None:
        self.model, self.x, self.y, self.ids = model, x, y, ids
        self.batch_size = batch_size or max(len(x), 1)
        self.found = x.clone()  # x' of the fallen; for the others the worst point of the first stage
        self.stages: list[Stage] = []
        begun = time.perf_counter()
        wrong = self._wrong(x, y)
        self.fallen_by = torch.where(wrong, CLEAN, STANDING)
        self._record("clean", "exact", len(x), int(wrong.sum()), begun)

    def storm(self, name: str, threat: Threat, model: nn.Module, search: str = "exact") -> None:
        """Search with a threat on some view of the model; judge with the model itself."""

        def move(rows: Tensor) -> Tensor:
            return disturb(threat, model, self.x[rows], self.y[rows], self.ids[rows])

        self._storm(name, search, move, self._portion(threat))

    def storm_again(self, name: str, threat: Threat, model: nn.Module) -> None:
        """After a fast search: shortly, and in full if that was not in vain or cannot be done."""
        if isinstance(threat, Attack) and not self._polish(name, threat, model):
            return
        self.storm(name, threat, model)

    def outcome(self) -> Outcome:
        return Outcome(self.found, self.fallen_by, tuple(self.stages))

    def _polish(self, name: str, attack: Attack, model: nn.Module) -> bool:
        """Search shortly from the worst points known; whether that fells more than a trusted fast search leaves."""

        def move(rows: Tensor) -> Tensor:
            dice = Dice(self.ids[rows], attack.seed, attack.tag())
            return attack.polish(model, self.x[rows], self.y[rows], dice, self.found[rows])

        self._storm(name, "polish", move, self._portion(attack))
        return self.stages[-1].fallen > TRUST * self.stages[-1].searched

    def _storm(self, name: str, search: str, move: Callable[[Tensor], Tensor], portion: int) -> None:
        """Move the images that stand, a portion at a time, and see which ones fall."""
        begun, rows = time.perf_counter(), (self.fallen_by == STANDING).nonzero().squeeze(1)
        fallen = sum(self._see(move(part), part) for part in rows.split(portion) if len(part))
        self._record(name, search, len(rows), fallen, begun)

    def _see(self, moved: Tensor, rows: Tensor) -> int:
        fallen, first = self._wrong(moved, self.y[rows]), len(self.stages) == 1
        self.found[rows] = torch.where(per_image(fallen | first, moved), moved, self.found[rows])
        self.fallen_by[rows[fallen]] = len(self.stages)
        return int(fallen.sum())

    def _wrong(self, x: Tensor, y: Tensor) -> Tensor:
        logits = clean_logits(self.model, x, self.batch_size)
        if logits.isnan().any():
            raise DataError(f"the model returned {int(logits.isnan().sum())} NaN logits; check its weights.")
        return logits.argmax(1) != y

    def _portion(self, threat: Threat) -> int:
        """Images given to a threat at once: all, if it makes batches by itself."""
        return max(len(self.x), 1) if hasattr(threat, "batch_size") else self.batch_size

    def _record(self, name: str, search: str, searched: int, fallen: int, begun: float) -> None:
        self.stages.append(Stage(name, search, searched, fallen, time.perf_counter() - begun))
