"""A teacher: a frozen model that takes the student's pixels through its own size and normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.models import ModelConfig, PixelModel, create_from_config, load_model


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
