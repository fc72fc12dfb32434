"""Supervised classification: cross-entropy on hard or soft labels, plus the penalties of attention stages."""

from __future__ import annotations

from torch import Tensor, nn

from vitruvius.tasks._base import Objective, tasks
from vitruvius.tasks._losses import Criterion


@tasks.register("supervised")
class Supervised(Objective):
    """Cross-entropy on the labels.

    smoothing: label smoothing of hard labels; the data's if the recipe does not say
    binary: binary cross-entropy for each class instead of cross-entropy over the classes
    penalty: weight of the penalties of attention stages such as low_rank
    """

    def __init__(self, model: nn.Module, *, smoothing: float = 0.0, binary: bool = False, penalty: float = 0.0) -> None:
        super().__init__(model, Criterion(smoothing=smoothing, binary=binary), penalty=penalty)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        output, penalty = self.call_model(input)
        return self.total(self.criterion(output, target), output, penalty)
