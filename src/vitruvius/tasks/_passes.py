"""Passes of the model that is trained: several as one forward, in a mode and a precision of their own.

One forward is what DistributedDataParallel needs when a loss looks at x and x'.
A second forward of a distributed model would overwrite the buffers that the first one's gradient still needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SCALE = 2.0**12  # the gradients of an image are small, float16 ends at 6e-8


class Passes(nn.Module):
    """(x, x', …) → (logits, logits', …); `updating` says which passes add to the statistics of batch norms."""

    looks_through: ClassVar[bool] = True  # for surgery, checkpoints and evaluation this is the model inside

    def __init__(self, model: nn.Module, updating: tuple[bool, ...]) -> None:
        super().__init__()
        self.model = model
        self.updating = updating
        self._called = (model,)  # in a tuple: what is compiled must not be registered a second time

    @property
    def module(self) -> nn.Module:
        """The model, by the name under which timm's `unwrap_model` looks for it."""
        return self.model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.one(x, updating=updating) for x, updating in zip(inputs, self.updating, strict=False))

    def one(self, x: Tensor, *, updating: bool) -> Tensor:
        """One pass of the model, compiled if it is."""
        rest: AbstractContextManager[None] = nullcontext() if updating else batch_norm_frozen(self.model)
        with rest:
            logits: Tensor = self._called[0](x)
        return logits

    def compile_inside(self, **settings: Any) -> nn.Module:
        """Compile the model, so that all passes share one graph."""
        compiled: nn.Module = torch.compile(self.model, **settings)  # type: ignore[assignment]
        self._called = (compiled,)
        return compiled


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside; outside each in the mode it had, also where they differ.

    `model` is any module.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def batch_norm_frozen(model: nn.Module) -> Iterator[None]:
    """Batch norms use the statistics of the batch, as in training, and do not add them to their running ones.

    `model` is any module; its other parts keep their mode.
    """
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


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
