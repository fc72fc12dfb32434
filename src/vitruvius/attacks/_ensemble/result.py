"""What an ensemble of attacks found: x', which stage broke which image, and what every stage did. B images."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

ROBUST = -1  # in `broken_by`: no stage broke the image
CLEAN = 0  # in `broken_by`: misclassified as it is


class StageResult(NamedTuple):
    """What one attack did."""

    name: str
    search: str  # exact, fast, or polish: the short exact search after a fast one
    searched: int  # images
    broken: int  # images, of those searched
    seconds: float

    @property
    def label(self) -> str:
        """The stage's name, with its way to search unless that is exact."""
        return stage_label(self.name, self.search)

    @property
    def fallen(self) -> int:
        """Deprecated: `broken`."""
        _deprecated("StageResult.fallen", "broken")
        return self.broken


@dataclass(frozen=True)
class Outcome:
    """Stage 0 is `clean`: images the model gets wrong as they are."""

    x: Tensor  # x': fools the model where the image is broken
    broken_by: Tensor  # (B,) index into stages; −1 where the image is robust
    stages: tuple[StageResult, ...]

    @property
    def robust(self) -> Tensor:
        """(B,) bool: no stage broke the image."""
        return self.broken_by == ROBUST

    def robust_after(self, stage: int) -> Tensor:
        """(B,) bool: not broken by the stage of index `stage` or one before it."""
        return self.robust | (self.broken_by > stage)

    def robust_by_stage(self) -> dict[str, Tensor]:
        """(B,) bool after each stage, in order; a stage that comes again has a label of its own."""
        robust: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            robust[_numbered(stage.label, list(robust))] = self.robust_after(index)
        return robust

    def accuracies(self) -> dict[str, float]:
        """Robust accuracy after each stage."""
        return {label: float(robust.double().mean()) for label, robust in self.robust_by_stage().items()}

    @property
    def fallen_by(self) -> Tensor:
        """Deprecated: `broken_by`."""
        _deprecated("Outcome.fallen_by", "broken_by")
        return self.broken_by

    @property
    def standing(self) -> Tensor:
        """Deprecated: `robust`."""
        _deprecated("Outcome.standing", "robust")
        return self.robust


def stage_label(name: str, search: str) -> str:
    """A stage's name, with its way to search unless that is exact."""
    if search == "exact":
        return name
    return f"{name} ({search})"


def _numbered(label: str, known: list[str]) -> str:
    """The label, or "label #2" where it is taken."""
    repeats = sum(other == label or other.startswith(f"{label} #") for other in known)
    if repeats:
        return f"{label} #{repeats + 1}"
    return label


def _deprecated(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now called {new}; the old name goes in the next release.", DeprecationWarning, stacklevel=3
    )
