"""torch.compile for searches: the model for every batch size, and a search's bookkeeping as a few kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vitruvius.attacks._batching import State
from vitruvius.attacks._models import Wrapper, loss_and_grad

S = TypeVar("S", bound=State)


class CompiledStep(Generic[S]):
    """A step (state, …) → state, compiled; where that fails or gives something else, the step itself and a warning."""

    def __init__(self, step: Callable[..., S]) -> None:
        self.step = step
        self.faster: Callable[..., Sequence[Tensor]] | None = None  # known after the first call

    def __call__(self, state: S, *rest: Any) -> S:
        if len(state.done) == 1:  # the compiler would make a program of its own for a single image
            return self.step(state, *rest)
        self.faster = self.faster or self._tried(state, *rest)
        return type(state)(*self.faster(state, *rest))

    def _tried(self, state: S, *rest: Any) -> Callable[..., Sequence[Tensor]]:
        step: Callable[..., Any] = self.step

        def plain_tensors(state: S, *rest: Any) -> tuple[Tensor, ...]:
            return tuple(step(state, *rest))

        faster: Callable[..., tuple[Tensor, ...]] = torch.compile(plain_tensors, dynamic=True)
        try:
            for mine, theirs in zip(faster(state, *rest), step(state, *rest), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        except Exception as error:  # whatever the compiler stumbles over, the attack can go on without it
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"torch.compile failed on {step.__name__} ({reason}); attacking without it.", stacklevel=3)
            return step
        return faster


class CompiledModel(nn.Module, Wrapper):
    """A model compiled once for every number of images; `inner` is the model as it was."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.faster: Any = torch.compile(model, dynamic=True)
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # the compiler would make a program of its own for a single image
            x = torch.cat([x, x])
            return self.faster(x)[:1]
        return self.faster(x)


def compile_model(model: nn.Module, x: Tensor) -> nn.Module:
    """The model compiled; where that fails, the model as it is, and a warning."""
    if _is_compiled(model):
        return model
    faster = CompiledModel(model)
    try:
        loss_and_grad(faster, x[:3], lambda logits: logits.sum(1))
    except Exception as error:  # whatever the compiler stumbles over, the attack can go on without it
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"torch.compile failed on {type(model).__name__} ({reason}); attacking without it.", stacklevel=2)
        return model
    return faster


def _is_compiled(model: Any) -> bool:
    """Whether one of the wrappers around the model has compiled it."""
    while isinstance(model, Wrapper):
        if isinstance(model, CompiledModel):
            return True
        model = model.inner
    return False
