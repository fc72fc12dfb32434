"""Supervised classification: cross-entropy on hard or soft labels, plus the penalties of attention stages."""

from __future__ import annotations

from torch import Tensor

from vitruvius.tasks.base import Objective, tasks


@tasks.register("supervised")
class Supervised(Objective):
    """Cross-entropy on the labels."""

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        output, penalty = self.call_model(input)
        return self.total(self.criterion(output, target), output, penalty)
