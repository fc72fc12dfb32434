"""Adversarial training: cross-entropy at x' (Madry et al. 2018, arXiv:1706.06083).

With one step and the step size of the final eps it is the light recipe (Debenedetti et al. 2023, arXiv:2209.07399).
"""

from __future__ import annotations

from torch import Tensor

from vitruvius.tasks._adversarial import AdversarialObjective
from vitruvius.tasks._base import tasks


@tasks.register("adversarial")
class Adversarial(AdversarialObjective):
    """Cross-entropy at x', found by any attack of ours on the true labels."""

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.disturb(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.call_model(attacked)
        return self.total(self.criterion(output, target), output, penalty, **numbers)
