"""Knowledge distillation: labels, and what a teacher says of the same pixels (Hinton et al. 2015, arXiv:1503.02531).

hard: the teacher's decision (Touvron et al. 2021, arXiv:2012.12877); feature: its pooled features. Weights and losses
are those of timm's distillation tasks, which want normalised images; ours go through each model's own normalisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius.models import PixelModel, load_model
from vitruvius.models.config import ModelConfig
from vitruvius.models.create import create_from_config
from vitruvius.surgery.base import inner
from vitruvius.tasks.base import Objective, Wrapped, divergence, tasks


@dataclass(eq=False, repr=False, kw_only=True)
class Taught:
    """What tasks with a teacher share: its settings and itself."""

    teacher: str = required("a timm model or a run folder")
    teacher_weights: str | None = key(None, "a file with the weights of a timm teacher; null: its pretrained ones")
    temperature: float = key(1.0, "divides the logits of both before they are compared")
    distill_loss_weight: float | None = key(None, "weight of the teacher; null: 1, or one minus task_loss_weight")
    task_loss_weight: float | None = key(None, "weight of the labels; null: 1")

    def load_teacher(self: Any, student: PixelModel, *, same_classes: bool = True) -> None:
        """Make `frozen_teacher`, and `weights` of labels and teacher by timm's rule."""
        self.frozen_teacher = load_teacher(self.teacher, weights=self.teacher_weights, classes=student.num_classes)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"task.temperature = {self.temperature}, expected a finite number above 0.")
        labels, taught = self.task_loss_weight, self.distill_loss_weight
        if taught is None:
            taught = 1.0 if labels is None else 1.0 - labels
        self.weights = (1.0 if labels is None else labels, taught)
        check_weight(self.weights[0], "task.task_loss_weight")
        check_weight(self.weights[1], "task.distill_loss_weight")
        known = self.frozen_teacher.model.num_classes
        if same_classes and known != student.num_classes:
            raise ConfigError(
                f"the teacher knows {known} classes, the student {student.num_classes}; "
                "take a teacher of the same data, or kind: feature."
            )


@tasks.register("distillation")
@dataclass(eq=False, repr=False, kw_only=True)
class Distillation(Taught, Objective):
    """Cross-entropy plus what keeps the student near a teacher: a timm model or a run folder.

    A student with a distillation token (deit_*_distilled, levit) learns from the teacher with that token.
    """

    kind: Literal["soft", "hard", "feature"] = key(
        "soft", "the teacher's probabilities (soft), its decision (hard), or its pooled features"
    )

    def __post_init__(self, model: nn.Module) -> None:
        super().__post_init__(model)
        student = cast(PixelModel, model)
        self.load_teacher(student, same_classes=self.kind != "feature")
        if self.kind == "feature":
            self.trainable_module = Featured(student, feature_width(self.frozen_teacher.model))
        elif hasattr(inner(student), "set_distilled_training"):  # both of its heads answer while it trains
            inner(student).set_distilled_training(True)  # type: ignore[operator]

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        answer, penalty = self.call_model(input)
        output, taught = answer if isinstance(answer, tuple) else (answer, answer)
        task_loss, teacher = self.criterion(output, target), self.frozen_teacher
        if self.kind == "feature":
            distill_loss = F.mse_loss(taught.float(), teacher.features(input).float())
        else:
            distill_loss = lesson(taught, teacher(input), hard=self.kind == "hard", temperature=self.temperature)
        loss = self.weights[0] * task_loss + self.weights[1] * distill_loss
        return self.total(loss, output, penalty, task_loss=task_loss.detach(), distill_loss=distill_loss.detach())

    def compile(self, backend: str = "inductor", mode: str | None = None, **settings: Any) -> nn.Module:
        """torch.compile the student and the teacher; the arguments are torch.compile's."""
        if self.kind != "feature":
            self.frozen_teacher.model.compile(backend=backend, mode=mode, **settings)
        return super().compile(backend=backend, mode=mode, **settings)

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The student itself: evaluation knows nothing of features."""
        model = super().get_eval_model(module=module, ema=ema)
        return unwrap_model(model) if self.kind == "feature" and model is not None else model

    def own_parameters(self) -> list[nn.Parameter]:
        """What is trained beside the model: the projection of its features."""
        return list(self.featured().projection.parameters()) if self.kind == "feature" else []

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The projection, which is no part of the model."""
        return {"projection": self.featured().projection.state_dict()} if self.own_parameters() else {}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if state:
            self.featured().projection.load_state_dict(state["projection"], strict=strict)

    def featured(self) -> Featured:
        """The student with its projection, inside the compiler's and DistributedDataParallel's wrappers."""
        module: Any = self.trainable_module
        while not isinstance(module, Featured):
            module = getattr(module, "_orig_mod", None) or module.module
        return module


class Teacher(nn.Module):
    """Logits or features of pixels (B, C, H, W); always in eval mode, never with gradients."""

    def __init__(self, model: PixelModel) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = tuple(model.data_config["input_size"][-2:])

    def train(self, mode: bool = True) -> Teacher:
        """A teacher stays as it is when the task is set to train."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(self.resized(x))
        return logits.detach()

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """(B, C) what the head sees."""
        return logits_and_features(self.model, self.resized(x))[1].detach()

    def resized(self, x: Tensor) -> Tensor:
        """Pixels of the size the teacher was made for."""
        if tuple(x.shape[-2:]) == self.size:
            return x
        return F.interpolate(x, self.size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def load_teacher(name: str, *, weights: str | None = None, classes: int) -> Teacher:
    """A run folder; or a timm model with its pretrained weights, or with those of a file."""
    if (Path(name) / "config.yaml").exists():
        if weights is not None:
            raise ConfigError(f"task.teacher = {name} is a run and has weights; leave task.teacher_weights out.")
        return Teacher(load_model(name))
    kwargs = {"num_classes": classes} if weights is not None else {}
    config = ModelConfig(name=name, pretrained=weights is None, weights=weights, kwargs=kwargs)
    return Teacher(create_from_config(config))


def logits_and_features(model: PixelModel, x: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K) logits and (B, C) pooled features before the head, of a timm model in its normalisation."""
    inside: Any = model.model
    if not hasattr(inside, "forward_features") or not hasattr(inside, "forward_head"):
        raise ConfigError(f"{type(inside).__name__} does not show its features; distil with kind: soft or hard.")
    maps = inside.forward_features((x - model.mean) / model.std)
    return inside.forward_head(maps), inside.forward_head(maps, pre_logits=True)


def lesson(student: Tensor, teacher: Tensor, *, hard: bool, temperature: float) -> Tensor:
    """T² · mean KL(teacher ‖ student) of logits at temperature T; or cross-entropy with the teacher's decision."""
    if hard:
        return F.cross_entropy(student, teacher.argmax(1))
    return divergence(teacher / temperature, student / temperature).mean() * temperature**2


class Featured(Wrapped):
    """x → (logits (B, K), features (B, T)), T the teacher's width; a linear map where the student's differs."""

    model: PixelModel

    def __init__(self, model: PixelModel, width: int) -> None:
        super().__init__(model)
        student = feature_width(model)
        self.projection = nn.Identity() if student == width else nn.Linear(student, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features of pixels (B, C, H, W)."""
        logits, features = logits_and_features(self.model, x)
        return logits, self.projection(features)


def feature_width(model: PixelModel) -> int:
    """Channels of what the head sees."""
    inside: Any = model.model
    width = getattr(inside, "head_hidden_size", None) or getattr(inside, "num_features", None)
    if width is None:
        raise ConfigError(f"{type(inside).__name__} does not say how wide its features are; use kind: soft or hard.")
    return int(width)
