"""What an AutoAttack found: x', who felled which image, and what every stage did. B images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

STANDING, CLEAN = -1, 0


class Stage(NamedTuple):
    """What one attack did."""

    name: str
    search: str  # exact, fast, or polish: the short exact search after a fast one
    searched: int
    fallen: int
    seconds: float

    @property
    def label(self) -> str:
        return self.name if self.search == "exact" else f"{self.name} ({self.search})"


@dataclass(frozen=True)
class Outcome:
    """Stage 0 is `clean`: images the model gets wrong untouched."""

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
        """(B,) bool after each stage, in order; a search that comes again has a label of its own."""
        standing: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            repeats = sum(known == stage.label or known.startswith(f"{stage.label} #") for known in standing)
            standing[f"{stage.label} #{repeats + 1}" if repeats else stage.label] = self.standing_after(index)
        return standing

    def accuracies(self) -> dict[str, float]:
        """Robust accuracy after each stage."""
        return {label: float(standing.double().mean()) for label, standing in self.standing_by_stage().items()}
