"""What an init works on: the attention layers of a model, in order, each with its weights, site and positions.

Letters: N patches, C model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitruvius._errors import UnsuitableSite
from vitruvius._registry import Registry
from vitruvius.heads import HeadWeights, Site


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One attention layer: writing into `weights` writes into the model."""

    weights: HeadWeights
    site: Site
    positions: Tensor | None = None  # (N, C), what is added to the patch embeddings
    no_positions: str = "the model adds no position table to its patches"  # why `positions` is None

    def require_positions(self, init: str) -> Tensor:
        """The position table, or a refusal that says why there is none. `init` is the name of what needs it."""
        if self.positions is None:
            raise UnsuitableSite(
                f"{init!r} needs a position table for {self.site.name!r} ({self.site.family}): {self.no_positions}."
            )
        return self.positions


class Init(Protocol):
    """A start for attention: a function of the layers, its settings bound, writing into their weights.

    `layers` come in the model's order; `generator` is where all randomness comes from.
    """

    def __call__(self, layers: Sequence[Layer], /, *, generator: torch.Generator) -> None: ...


class Base(Protocol):
    """A start for a whole model: a function of the module, its settings bound.

    `model` is written to; `generator` is where all randomness comes from.
    """

    def __call__(self, model: nn.Module, /, *, generator: torch.Generator) -> None: ...


InitSpec = str | Mapping[str, Any] | Init  # "mimetic:alpha=0.6", {"use": "mimetic", "alpha": 0.6}, or a function
BaseSpec = str | Mapping[str, Any] | Base
inits: Registry[Callable[..., None]] = Registry("init", homes=["vitruvius.init"])
bases: Registry[Callable[..., None]] = Registry("base init", "bases", homes=["vitruvius.init"])
