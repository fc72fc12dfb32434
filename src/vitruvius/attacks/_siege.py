"""A siege: one attack after the other on the images that still stand, and a record of who brought each one down.

An image counts as fallen only if its x' fools the float32 model; what a faster search claims is always checked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius.attacks._base import Threat, disturb
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._targets import clean_logits

STANDING, CLEAN = -1, 0


class Stage(NamedTuple):
    """What one attack did."""

    name: str
    precision: str  # of the search: exact or fast
    searched: int
    fallen: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What an AutoAttack found. Stage 0 is `clean`: images the model gets wrong untouched."""

    x: Tensor  # x': fools the model where the image has fallen
    fallen_by: Tensor  # (B,) index into stages; −1 where the image stands
    stages: tuple[Stage, ...]

    @property
    def standing(self) -> Tensor:
        """(B,) bool."""
        return self.fallen_by == STANDING

    def standing_after(self, stage: int) -> Tensor:
        """(B,) bool: not fallen to this stage or one before it."""
        return self.standing | (self.fallen_by > stage)

    def standing_by_stage(self) -> dict[str, Tensor]:
        """(B,) bool after each stage, in order; a search that comes again has a name of its own."""
        standing: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            name = stage.name if stage.precision == "exact" else f"{stage.name} ({stage.precision})"
            repeats = sum(known == name or known.startswith(f"{name} #") for known in standing)
            standing[f"{name} #{repeats + 1}" if repeats else name] = self.standing_after(index)
        return standing

    def accuracies(self) -> dict[str, float]:
        """Robust accuracy after each stage."""
        return {name: float(standing.double().mean()) for name, standing in self.standing_by_stage().items()}


class Siege:
    """The images, where they stand, and what has been tried."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, batch_size: int | None) -> None:
        self.model, self.x, self.y, self.ids = model, x, y, ids
        self.batch_size = batch_size or max(len(x), 1)
        self.found = x.clone()
        self.stages: list[Stage] = []
        begun = time.perf_counter()
        wrong = self._wrong(x, y)
        self.fallen_by = torch.where(wrong, CLEAN, STANDING)
        self._record("clean", "exact", len(x), int(wrong.sum()), begun)

    def storm(self, name: str, threat: Threat, model: nn.Module, precision: str = "exact") -> None:
        """Search with a threat on some view of the model; judge with the model itself."""
        begun, rows = time.perf_counter(), self.standing()
        parts = rows.split(len(rows) or 1 if hasattr(threat, "batch_size") else self.batch_size)
        fallen = sum(self._storm_part(threat, model, part) for part in parts if len(part))
        self._record(name, precision, len(rows), fallen, begun)

    def standing(self) -> Tensor:
        """Indices of the images that still stand."""
        return (self.fallen_by == STANDING).nonzero().squeeze(1)

    def outcome(self) -> Outcome:
        return Outcome(self.found, self.fallen_by, tuple(self.stages))

    def _storm_part(self, threat: Threat, model: nn.Module, rows: Tensor) -> int:
        moved = disturb(threat, model, self.x[rows], self.y[rows], self.ids[rows])
        fallen = self._wrong(moved, self.y[rows])
        first = len(self.stages) == 1  # images that stand keep the point of the first stage
        self.found[rows] = torch.where(per_image(fallen | first, moved), moved, self.found[rows])
        self.fallen_by[rows[fallen]] = len(self.stages)
        return int(fallen.sum())

    def _wrong(self, x: Tensor, y: Tensor) -> Tensor:
        logits = clean_logits(self.model, x, self.batch_size)
        if logits.isnan().any():
            raise DataError(
                f"the model returned {int(logits.isnan().sum())} NaN logits; an attack on it means nothing."
            )
        return logits.argmax(1) != y

    def _record(self, name: str, precision: str, searched: int, fallen: int, begun: float) -> None:
        self.stages.append(Stage(name, precision, searched, fallen, time.perf_counter() - begun))
