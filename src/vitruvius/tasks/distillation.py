"""Knowledge distillation: labels, and what a teacher says of the same pixels (Hinton et al. 2015, arXiv:1503.02531).

hard: the teacher's decision (Touvron et al. 2021, arXiv:2012.12877); feature: its pooled features. Weights and losses
are those of timm's distillation tasks, which want normalised images; ours go through each model's own normalisation.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._errors import ConfigError
from vitruvius.models import PixelModel
from vitruvius.surgery.base import inner
from vitruvius.tasks._base import Objective, tasks
from vitruvius.tasks._losses import Criterion, divergence
from vitruvius.tasks._teacher import load_teacher, logits_and_features


@tasks.register("distillation")
class Distillation(Objective):
    """Cross-entropy plus what keeps the student near a teacher: a timm model or a run folder.

    A student with a distillation token (deit_*_distilled, levit) learns from the teacher with that token.

    teacher: a timm model or a run folder
    teacher_weights: a file with the weights of a timm teacher; null: its pretrained ones
    kind: the teacher's probabilities (soft), its decision (hard), or its pooled features
    temperature: divides the logits of both before they are compared (soft)
    distill_loss_weight: weight of the teacher; null: 1, or one minus task_loss_weight
    task_loss_weight: weight of the labels; null: 1
    smoothing: label smoothing of hard labels; the data's if the recipe does not say
    binary: binary cross-entropy for each class instead of cross-entropy over the classes
    penalty: weight of the penalties of attention stages such as low_rank
    """

    def __init__(
        self,
        model: PixelModel,
        *,
        teacher: str,
        teacher_weights: str | None = None,
        kind: Literal["soft", "hard", "feature"] = "soft",
        temperature: float = 1.0,
        distill_loss_weight: float | None = None,
        task_loss_weight: float | None = None,
        smoothing: float = 0.0,
        binary: bool = False,
        penalty: float = 0.0,
    ) -> None:
        super().__init__(model, Criterion(smoothing=smoothing, binary=binary), penalty=penalty)
        self.teacher = load_teacher(teacher, weights=teacher_weights, classes=model.num_classes)
        check_temperature(temperature)
        self.weights = weights_of(task_loss_weight, distill_loss_weight)
        self.kind, self.temperature = kind, temperature
        if kind == "feature":
            self.trainable_module = Featured(model, feature_width(self.teacher.model))
        else:
            check_classes(self.teacher.model, model)
            use_token(model)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        answer, penalty = self.call_model(input)
        output, taught = answer if isinstance(answer, tuple) else (answer, answer)
        task_loss, lesson = self.criterion(output, target), self.lesson(taught, input)
        loss = self.weights[0] * task_loss + self.weights[1] * lesson
        return self.total(loss, output, penalty, task_loss=task_loss.detach(), distill_loss=lesson.detach())

    def lesson(self, taught: Tensor, x: Tensor) -> Tensor:
        """How far the student is from the teacher.

        `taught` is what the student answers, logits or features (B, …); `x` (B, C, H, W) the pixels it answers to.
        """
        if self.kind == "feature":
            return F.mse_loss(taught.float(), self.teacher.features(x).float())
        return lesson(taught, self.teacher(x), hard=self.kind == "hard", temperature=self.temperature)

    def compile(self, backend: str = "inductor", mode: str | None = None, **settings: Any) -> nn.Module:
        """torch.compile the student and the teacher.

        `backend` and `mode` are torch.compile's, by default those that torch chooses; `settings` whatever else it
        takes.
        """
        if self.kind != "feature":
            self.teacher.model.compile(backend=backend, mode=mode, **settings)
        return super().compile(backend=backend, mode=mode, **settings)

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The student itself: evaluation knows nothing of features."""
        found = super().get_eval_model(module=module, ema=ema)
        return unwrap_model(found) if self.kind == "feature" and found is not None else found

    def own_parameters(self) -> list[nn.Parameter]:
        """What is trained beside the model: the projection of its features."""
        return list(self.featured().projection.parameters()) if self.kind == "feature" else []

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The projection, which is no part of the model."""
        return {"projection": self.featured().projection.state_dict()} if self.own_parameters() else {}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """Put back what `get_task_state` returned: `state`, or None for a run that has none.

        `strict` refuses keys that do not fit (default); `module` and `ema` are as timm's loop passes them on.
        """
        if state:
            self.featured().projection.load_state_dict(state["projection"], strict=strict)

    def featured(self) -> Featured:
        """The student with its projection, inside the compiler's and DistributedDataParallel's wrappers."""
        found: Any = self.trainable_module
        while not isinstance(found, Featured):
            found = getattr(found, "_orig_mod", None) or found.module
        return found


def lesson(student: Tensor, teacher: Tensor, *, hard: bool, temperature: float) -> Tensor:
    """T² · mean KL(teacher ‖ student) at temperature T; or cross-entropy with the teacher's decision.

    `student` and `teacher` are logits (B, K); `hard` takes that decision; `temperature` is T.
    """
    if hard:
        return F.cross_entropy(student, teacher.argmax(1))
    return divergence(teacher / temperature, student / temperature).mean() * temperature**2


def weights_of(task: float | None, distill: float | None) -> tuple[float, float]:
    """Weights of labels and teacher, by timm's rule.

    `task` and `distill` are those of the recipe, None where it says nothing.
    """
    weights = (1.0, 1.0)
    if distill is not None:
        weights = (1.0 if task is None else task), distill
    elif task is not None:
        weights = (task, 1.0 - task)
    check_weight(weights[0], "task.task_loss_weight")
    check_weight(weights[1], "task.distill_loss_weight")
    return weights


def check_temperature(temperature: float) -> None:
    """Refuse a `temperature` by which no logits can be divided."""
    if not 0 < temperature < math.inf:
        raise ConfigError(f"task.temperature = {temperature}, expected a finite number above 0.")


def check_classes(teacher: PixelModel, student: PixelModel) -> None:
    """A teacher of other classes has nothing to say about these. `teacher` and `student` must have as many."""
    if teacher.num_classes != student.num_classes:
        raise ConfigError(
            f"the teacher knows {teacher.num_classes} classes, the student {student.num_classes}; "
            "take a teacher of the same data, or kind: feature."
        )


def use_token(student: nn.Module) -> None:
    """Let a `student` that has a distillation token answer with both of its heads while it trains."""
    set_training = getattr(inner(student), "set_distilled_training", None)
    if set_training is not None:
        set_training(True)


class Featured(nn.Module):
    """x → (logits (B, K), features (B, T)), T the teacher's width; a linear map where the student's differs.

    `model` is the student; `width` is T.
    """

    looks_through: ClassVar[bool] = True  # for surgery, checkpoints and evaluation this is the model inside

    def __init__(self, model: PixelModel, width: int) -> None:
        super().__init__()
        self.model = model
        own = feature_width(model)
        self.projection = nn.Identity() if own == width else nn.Linear(own, width)

    @property
    def module(self) -> nn.Module:
        """The model, by the name under which timm's `unwrap_model` looks for it."""
        return self.model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features of pixels `x` (B, C, H, W)."""
        logits, features = logits_and_features(self.model, x)
        return logits, self.projection(features)


def feature_width(model: PixelModel) -> int:
    """Channels of what the head sees. `model` has a head of its own."""
    inside: Any = model.model
    width = getattr(inside, "head_hidden_size", None) or getattr(inside, "num_features", None)
    if width is None:
        raise ConfigError(f"{type(inside).__name__} does not say how wide its features are; use kind: soft or hard.")
    return int(width)
