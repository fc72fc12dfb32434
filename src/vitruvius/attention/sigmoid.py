"""Sigmoid attention: every pair by itself, sigmoid(q kᵀ · scale + bias + b) v with b = −log M.

Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", arXiv:2409.04431.
The weights of a query need not add to one: the map that is shown is the one that is used, rows and all.
B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import math

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import DenseKernel, attentions, scores
from vitruvius.heads import Heads, Site


@attentions.register("sigmoid")
class Sigmoid(DenseKernel):
    """Sigmoid attention: no sum over keys, weights need not add to one (Ramapuram et al. 2024, arXiv:2409.04431).

    `offset` is added to every score; by default −log(number of keys), so that small scores begin with weights 1/M.
    """

    map_text = "its weights, which do not sum to one"
    surrogate = ("softmax",)  # a sigmoid saturates

    def __init__(self, site: Site, *, offset: float | None = None) -> None:
        super().__init__()
        if offset is not None and not math.isfinite(offset):
            raise ConfigError(f"'sigmoid' got offset={offset}; it is added to every score and must be finite.")
        self.offset = offset

    def map(self, heads: Heads) -> Tensor:
        offset = -math.log(heads.k.shape[-2]) if self.offset is None else self.offset
        return (scores(heads) + offset).sigmoid().to(heads.v.dtype)

    def extra_repr(self) -> str:
        return "offset=-log M" if self.offset is None else f"offset={self.offset}"
