"""A student that shows its features: logits for the labels, projected features for the teacher, in one forward."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.models import PixelModel
from vitruvius.tasks._teacher import logits_and_features


class Featured(nn.Module):
    """x → (logits (B, K), features (B, T)), T the teacher's width; a linear map where the student's differs."""

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
        logits, features = logits_and_features(self.model, x)
        return logits, self.projection(features)


def feature_width(model: PixelModel) -> int:
    """Channels of what the head sees."""
    inside: Any = model.model
    width = getattr(inside, "head_hidden_size", None) or getattr(inside, "num_features", None)
    if width is None:
        raise ConfigError(f"{type(inside).__name__} does not say how wide its features are; use kind: soft or hard.")
    return int(width)
