"""Several passes of one model as one forward: what DistributedDataParallel needs when a loss looks at x and x'.

A second forward of a distributed model would overwrite the buffers that the first one's gradient still needs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitruvius.tasks._modes import resting


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
        rest: AbstractContextManager[None] = nullcontext() if updating else resting(self.model)
        with rest:
            logits: Tensor = self._called[0](x)
        return logits

    def compile_inside(self, **settings: Any) -> nn.Module:
        """Compile the model, so that all passes share one graph."""
        compiled: nn.Module = torch.compile(self.model, **settings)  # type: ignore[assignment]
        self._called = (compiled,)
        return compiled
