"""Models as attacks see them: parameters frozen, gradients with respect to the image, stand-ins for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError


class LossAndGrad(NamedTuple):
    """The model and the loss at a point."""

    logits: Tensor  # (B, K)
    loss: Tensor  # (B,)
    grad: Tensor  # of x's shape


def loss_and_grad(
    model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor], passes: int = 1
) -> LossAndGrad:
    """Logits, losses and the gradient of each image's own loss with respect to that image.

    Several `passes` are averaged: expectation over transformation, for models that are random (Athalye et al. 2018).
    """
    slopes = [_one_pass(model, x, loss) for _ in range(passes)]
    if passes == 1:
        return slopes[0]
    return LossAndGrad(*(torch.stack(parts).mean(0) for parts in zip(*slopes, strict=True)))


def _one_pass(model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]) -> LossAndGrad:
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
    return LossAndGrad(logits.detach(), losses.detach(), grad)


def full_precision(logits: Tensor) -> Tensor:
    """Logits in at least float32, whatever the model computes in."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class SurrogateGradient(nn.Module):
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


class ModelWrapper:
    """Something put around a model to watch it or to make it faster."""

    inner: Callable[[Tensor], Tensor]


def unwrapped(model: Any) -> Callable[[Tensor], Tensor]:
    """The model as it was given."""
    while isinstance(model, ModelWrapper):
        model = model.inner
    return model


class VerifiedView(nn.Module, ModelWrapper):
    """A view of a model that is searched in its place, and the model itself, which has the last word."""

    def __init__(self, view: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.inner = view
        self.judge = judge
        self.training = judge.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits


def verifier_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Who has the last word on what fools this model, if not the model itself."""
    while isinstance(model, ModelWrapper):
        if isinstance(model, VerifiedView):
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


def check_logits(logits: Tensor, y: Tensor, rows: int) -> None:
    """Refuse logits that are not (rows, K) numbers with a class for each label. Reads the tensors once."""
    if logits.ndim != 2 or len(logits) != rows:
        raise ConfigError(f"the model returned shape {tuple(logits.shape)}; expected logits ({rows}, classes).")
    if logits.shape[1] < 2:
        raise ConfigError("the model has one output; attacks need a logit for each class, two for a binary problem.")
    if not len(y):
        return
    broken, label = torch.stack([logits.detach().isnan().sum().double(), y.amax().double()]).tolist()
    if broken:
        raise DataError(f"the model returned {broken:.0f} NaN logits for {rows} images; check its weights.")
    if y.ndim == 1 and label >= logits.shape[1]:
        raise DataError(f"labels reach up to {label:.0f}, but the model has {logits.shape[1]} classes.")


class CheckedModel(ModelWrapper):
    """A model whose first answer is checked, so that no extra pass is spent on it."""

    def __init__(self, model: Callable[[Tensor], Tensor], y: Tensor) -> None:
        self.inner, self.y = model, y
        self.seen = False

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        if not self.seen:
            check_logits(logits, self.y, len(x))
            self.seen = True
        return logits
