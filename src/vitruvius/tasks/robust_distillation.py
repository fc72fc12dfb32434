"""Adversarially robust distillation: at x' the student answers as the teacher does at x (Goldblum et al. 2020,
arXiv:1905.09747, equation 4); a robust teacher hands its robustness on.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from vitruvius.models import PixelModel
from vitruvius.tasks._adversarial import AdversarialObjective, Statistics
from vitruvius.tasks._base import tasks
from vitruvius.tasks._inner import Spec
from vitruvius.tasks._teacher import load_teacher
from vitruvius.tasks.distillation import check_classes, lesson, weights_of


@tasks.register("robust_distillation")
class RobustDistillation(AdversarialObjective):
    """Cross-entropy at x' plus the divergence between the teacher's answer at x and the student's at x'."""

    def __init__(
        self,
        model: PixelModel,
        *,
        teacher: str,
        eps: float,
        teacher_weights: str | None = None,
        temperature: float = 1.0,
        distill_loss_weight: float | None = None,
        task_loss_weight: float | None = None,
        norm: str = "linf",
        attack: Spec = "pgd",
        schedule: str | dict[str, Any] = "constant",
        coupled: bool = True,
        attack_mode: Literal["eval", "train"] = "eval",
        attack_precision: Literal["same", "fp32", "bf16"] = "same",
        compile_attack: bool = True,
        statistics: Statistics = ("adversarial",),
        log_clean: bool = False,
        smoothing: float = 0.0,
        binary: bool = False,
        penalty: float = 0.0,
    ) -> None:
        super().__init__(
            model,
            eps=eps,
            norm=norm,
            attack=attack,
            schedule=schedule,
            coupled=coupled,
            attack_mode=attack_mode,
            attack_precision=attack_precision,
            compile_attack=compile_attack,
            statistics=statistics,
            log_clean=log_clean,
            smoothing=smoothing,
            binary=binary,
            penalty=penalty,
        )
        self.teacher = load_teacher(teacher, weights=teacher_weights, classes=model.num_classes)
        check_classes(self.teacher.model, model)
        self.temperature, self.weights = temperature, weights_of(task_loss_weight, distill_loss_weight)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.attack(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.ask(attacked)
        taught = lesson(output, self.teacher(input), hard=False, temperature=self.temperature)
        loss = self.weights[0] * self.criterion(output, target) + self.weights[1] * taught
        return self.total(loss, output, penalty, distill_loss=taught.detach(), **numbers)
