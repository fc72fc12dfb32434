"""Adversarially robust distillation: at x' the student answers as the teacher does at x (Goldblum et al. 2020,
arXiv:1905.09747, equation 4); a robust teacher hands its robustness on.

loss = (1 − α) · C(f(x), y) + α · t² · mean KL(teacher(x) ‖ f(x')) at temperature t: labels are learned at x, not at x'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from vitruvius.models import PixelModel
from vitruvius.tasks.adversarial import TwoAnswers
from vitruvius.tasks.base import accuracy, tasks
from vitruvius.tasks.distillation import Taught, lesson


@tasks.register("robust_distillation")
@dataclass(eq=False, repr=False, kw_only=True)
class RobustDistillation(Taught, TwoAnswers):
    """Cross-entropy at x plus the divergence between the teacher's answer at x and the student's at x'.

    Where `task_loss_weight` is 0 the student does not look at x.
    """

    inputs = ("adversarial", "clean")

    def __post_init__(self, model: nn.Module) -> None:
        super().__post_init__(model)
        self.load_teacher(cast(PixelModel, model))

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        numbers = self.numbers(input, target)
        attacked = self.disturb(input, target)  # the images themselves where eps is 0
        looks_at_both = self.weights[0] > 0 and attacked is not input
        outputs, penalty = self.call_model(*((attacked, input) if looks_at_both else (attacked,)))
        output, clean = outputs[0], outputs[-1]
        taught = lesson(output, self.frozen_teacher(input), hard=False, temperature=self.temperature)
        loss = self.weights[1] * taught
        if self.weights[0] > 0:
            loss = loss + self.weights[0] * self.criterion(clean, target)
            numbers["clean_accuracy"] = accuracy(clean, target)
        return self.total(loss, output, penalty, distill_loss=taught.detach(), **numbers)
