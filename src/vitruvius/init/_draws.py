"""Random numbers from a generator, wherever it lives, in the shape and precision of a given tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    return drawn.erfinv_().mul_(std * math.sqrt(2)).clamp_(-cut, cut)


def _blank(like: Tensor, generator: torch.Generator) -> Tensor:
    precision = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(like.shape, dtype=precision, device=generator.device)
