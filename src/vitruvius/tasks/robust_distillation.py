"""Adversarially robust distillation: at x' the student answers as the teacher does at x (Goldblum et al. 2020,
arXiv:1905.09747, equation 4); a robust teacher hands its robustness on.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field

from torch import Tensor

from vitruvius._keys import key
from vitruvius.models import PixelModel
from vitruvius.tasks._adversarial import AdversarialObjective
from vitruvius.tasks._base import tasks
from vitruvius.tasks._teacher import load_teacher
from vitruvius.tasks.distillation import check_classes, check_temperature, lesson, weights_of


@tasks.register("robust_distillation")
@dataclass(eq=False, repr=False)
class RobustDistillation(AdversarialObjective):
    """Cross-entropy at x' plus the divergence between the teacher's answer at x and the student's at x'."""

    model: InitVar[PixelModel]
    _: KW_ONLY
    teacher: str = field(metadata={"help": "a timm model or a run folder"})
    teacher_weights: str | None = key(None, "a file with the weights of a timm teacher; null: its pretrained ones")
    temperature: float = key(1.0, "divides the logits of both before they are compared")
    distill_loss_weight: float | None = key(None, "weight of the teacher; null: 1, or one minus task_loss_weight")
    task_loss_weight: float | None = key(None, "weight of the labels; null: 1")

    def __post_init__(self, model: PixelModel) -> None:
        super().__post_init__(model)
        self.frozen_teacher = load_teacher(self.teacher, weights=self.teacher_weights, classes=model.num_classes)
        check_classes(self.frozen_teacher.model, model)
        check_temperature(self.temperature)
        self.weights = weights_of(self.task_loss_weight, self.distill_loss_weight)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.disturb(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.call_model(attacked)
        taught = lesson(output, self.frozen_teacher(input), hard=False, temperature=self.temperature)
        loss = self.weights[0] * self.criterion(output, target) + self.weights[1] * taught
        return self.total(loss, output, penalty, distill_loss=taught.detach(), **numbers)
