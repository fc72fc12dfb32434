"""Findings: what a check of a model's robustness saw, in a sentence and numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SLACK = 0.01  # share of images by which an order may be missed, and one image always


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check saw."""

    name: str
    passed: bool
    sentence: str
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = "suspicious"
        if self.passed:
            verdict = "ok        "
        return f"{verdict}  {self.name}: {self.sentence}{self._in_brackets()}"

    def remark(self) -> str:
        """What it says of a figure, in one sentence."""
        return f"{self.name}: {self.sentence}{self._in_brackets()}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _in_brackets(self) -> str:
        if not self.numbers:
            return ""
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.numbers.items())
        return f" ({numbers})"
