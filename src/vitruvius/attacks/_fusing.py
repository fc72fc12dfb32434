"""The bookkeeping of a search as a few kernels instead of twenty passes over the images, by torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._stream import State

S = TypeVar("S", bound=State)


class Fused(Generic[S]):
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
