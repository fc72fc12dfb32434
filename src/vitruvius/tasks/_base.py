"""What tasks share: their registry, and the penalties that stages of attention ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn

from vitruvius._registry import Registry

tasks: Registry[Callable[..., TrainingTask]] = Registry("task")


class Penalties:
    """Sums `stage.penalty(before, after)` over the stages of a model while it collects.

    Hooks watch the stages; a term counts only while `collecting` is open. The second forward of activation
    checkpointing runs in backward, when it is closed: it repeats the computation, as it must, and is not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stages = [module for module in model.modules() if callable(getattr(module, "penalty", None))]
        self._terms: list[Tensor] = []
        self._open = False
        for stage in self.stages:
            stage.register_forward_hook(self._note)

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """Terms of the forwards inside the block."""
        self._terms = []
        self._open = True
        try:
            yield self._terms
        finally:
            self._open = False

    def _note(self, stage: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            term = stage.penalty(inputs[0], output)
            if self._open:
                self._terms.append(term)
