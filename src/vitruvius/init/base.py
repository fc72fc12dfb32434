"""What inits work on and share: the layers of a model, the registries, random numbers.

Letters: N patches, C model width.
"""

from __future__ import annotations

import math
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
        """The position table, or a refusal that says why there is none."""
        if self.positions is None:
            raise UnsuitableSite(
                f"{init!r} needs a position table for {self.site.name!r} ({self.site.family}): {self.no_positions}."
            )
        return self.positions


class Init(Protocol):
    """A start for attention: a function of the layers in the model's order that writes into their weights."""

    def __call__(self, layers: Sequence[Layer], /, *, generator: torch.Generator) -> None: ...


class Base(Protocol):
    """A start for a whole model: a function that writes into a module."""

    def __call__(self, model: nn.Module, /, *, generator: torch.Generator) -> None: ...


InitSpec = str | Mapping[str, Any] | Init  # "mimetic:alpha=0.6", {"use": "mimetic", "alpha": 0.6}, or a function
BaseSpec = str | Mapping[str, Any] | Base
inits: Registry[Callable[..., None]] = Registry("init", homes=["vitruvius.init"])
bases: Registry[Callable[..., None]] = Registry("base init", "bases", homes=["vitruvius.init"])


def uniform(like: Tensor, bound: float, generator: torch.Generator) -> Tensor:
    """Uniform(−bound, bound)."""
    return _blank(like, generator).uniform_(-bound, bound, generator=generator)


def normal(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """N(0, std²)."""
    return _blank(like, generator).normal_(0.0, std, generator=generator)


def truncated_normal(like: Tensor, std: float, cut: float, generator: torch.Generator) -> Tensor:
    """N(0, std²) cut at ±cut, by the inverse of the distribution function: one uniform number per entry."""
    edge = math.erf(cut / std / math.sqrt(2))
    drawn = _blank(like, generator).uniform_(-edge, edge, generator=generator)
    most = 1 - torch.finfo(drawn.dtype).eps / 2  # one number in 2²⁴ is -1 itself, whose inverse is infinite
    return drawn.clamp_(-most, most).erfinv_().mul_(std * math.sqrt(2)).clamp_(-cut, cut)


def _blank(like: Tensor, generator: torch.Generator) -> Tensor:
    precision = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(like.shape, dtype=precision, device=generator.device)
