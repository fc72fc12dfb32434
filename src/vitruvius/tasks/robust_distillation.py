"""Adversarially robust distillation: at x' the student answers as the teacher does at x (Goldblum et al. 2020,
arXiv:1905.09747, equation 4); a robust teacher hands its robustness on.

loss = (1 − α) · C(f(x), y) + α · t² · mean KL(teacher(x) ‖ f(x')) at temperature t: labels are learned at x, not at x'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from vitruvius._config import key, required
from vitruvius.models import PixelModel
from vitruvius.tasks.adversarial import AdversarialObjective, Statistics
from vitruvius.tasks.base import accuracy, tasks
from vitruvius.tasks.distillation import check_classes, check_temperature, lesson, load_teacher, weights_of


@tasks.register("robust_distillation")
@dataclass(eq=False, repr=False, kw_only=True)
class RobustDistillation(AdversarialObjective):
    """Cross-entropy at x plus the divergence between the teacher's answer at x and the student's at x'.

    Where `task_loss_weight` is 0 the student does not look at x.
    """

    inputs = ("adversarial", "clean")

    teacher: str = required("a timm model or a run folder")
    teacher_weights: str | None = key(None, "a file with the weights of a timm teacher; null: its pretrained ones")
    temperature: float = key(1.0, "divides the logits of both before they are compared")
    distill_loss_weight: float | None = key(None, "weight of the teacher; null: 1, or one minus task_loss_weight")
    task_loss_weight: float | None = key(None, "weight of the labels; null: 1")
    statistics: Statistics = key(("clean", "adversarial"), "passes that add to the running statistics of batch norms")
    log_clean: bool = field(default=False, init=False)  # the loss has the clean answer anyway

    def __post_init__(self, model: nn.Module) -> None:
        super().__post_init__(model)
        student = cast(PixelModel, model)
        self.frozen_teacher = load_teacher(self.teacher, weights=self.teacher_weights, classes=student.num_classes)
        check_classes(self.frozen_teacher.model, student)
        check_temperature(self.temperature)
        self.weights = weights_of(self.task_loss_weight, self.distill_loss_weight)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        numbers = self.numbers(input, target)
        outputs, penalty = self.call_model(*self.looks(input, target))
        output, clean = outputs[0], outputs[-1]
        taught = lesson(output, self.frozen_teacher(input), hard=False, temperature=self.temperature)
        loss = self.weights[1] * taught
        if self.weights[0] > 0:
            loss = loss + self.weights[0] * self.criterion(clean, target)
            numbers["clean_accuracy"] = accuracy(clean, target)
        return self.total(loss, output, penalty, distill_loss=taught.detach(), **numbers)

    def looks(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """x', and x where the labels count and it is another image."""
        if self.inner.eps == 0:
            return (x,)
        attacked = self.disturb(x, y)
        return (attacked,) if self.weights[0] == 0 else (attacked, x)
