"""Models as attacks see them: parameters frozen, gradients with respect to the image, stand-ins for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError


class Slope(NamedTuple):
    """The model and the loss at a point."""

    logits: Tensor  # (B, K)
    loss: Tensor  # (B,)
    grad: Tensor  # of x's shape


def slope(model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor], passes: int = 1) -> Slope:
    """Logits, losses and the gradient of each image's own loss with respect to that image.

    Several `passes` are averaged: expectation over transformation, for models that are random (Athalye et al. 2018).
    """
    slopes = [_one_slope(model, x, loss) for _ in range(passes)]
    if passes == 1:
        return slopes[0]
    return Slope(*(torch.stack(parts).mean(0) for parts in zip(*slopes, strict=True)))


def _one_slope(model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]) -> Slope:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = full_precision(model(x))
        losses = loss(logits)
        if not losses.requires_grad:
            raise ConfigError(
                "the model's output has no gradient with respect to the image (no_grad inside its forward?). "
                "Gradient attacks need that; square, spsa and hopskipjump do not."
            )
        (grad,) = torch.autograd.grad(losses.sum(), x)
    return Slope(logits.detach(), losses.detach(), grad)


def full_precision(logits: Tensor) -> Tensor:
    """Logits in at least float32, whatever the model computes in."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class Through(nn.Module):
    """Answers like one model, with the gradient of another: what masks its gradient is attacked through a stand-in.

    Backward pass differentiable approximation, Athalye et al. 2018, arXiv:1802.00420.
    """

    def __init__(self, model: nn.Module, surrogate: nn.Module) -> None:
        super().__init__()
        self.model, self.surrogate = model, surrogate
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            answer: Tensor = self.model(x)
        if not torch.is_grad_enabled():
            return answer
        guide = self.surrogate(x)
        return answer + (guide - guide.detach())


class Around:
    """Something put around a model to watch it or to make it faster."""

    inner: Callable[[Tensor], Tensor]


def plain(model: Any) -> Callable[[Tensor], Tensor]:
    """The model as it was given."""
    while isinstance(model, Around):
        model = model.inner
    return model


class Judged(nn.Module, Around):
    """A view of a model that is searched in its place, and the model itself, which has the last word."""

    def __init__(self, view: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.inner = view
        self.judge = judge
        self.training = judge.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits


def judge_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Who has the last word on what fools this model, if not the model itself."""
    while isinstance(model, Around):
        if isinstance(model, Judged):
            return model.judge
        model = model.inner
    return None


@contextmanager
def frozen(model: object) -> Iterator[None]:
    """Parameters ask for no gradient inside, and for what they asked before outside."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    asking = [p for p in parameters if p.requires_grad]
    for p in asking:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in asking:
            p.requires_grad_(True)
