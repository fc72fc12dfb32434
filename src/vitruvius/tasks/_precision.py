"""Precision of the passes of an attack: as the training, or another; float16 gradients are kept from vanishing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SCALE = 2.0**12  # the gradients of an image are small, float16 ends at 6e-8


def precision_of(name: str, x: Tensor) -> AbstractContextManager[Any]:
    """`same` as the autocast around, `fp32`, or `bf16`."""
    if name == "same":
        return nullcontext()
    return torch.autocast(x.device.type, torch.bfloat16, enabled=name == "bf16")


def scaled_for_half(model: nn.Module, x: Tensor) -> nn.Module:
    """The model; under float16 autocast with larger gradients inside, and the same gradient at the image."""
    kind = x.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return Scaled(model) if half else model


class Scaled(nn.Module):
    """Gradients are multiplied where they enter and divided where they leave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(self.model(_Scale.apply(x, 1 / SCALE)).float(), SCALE)


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None
