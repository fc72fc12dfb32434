"""Scaled attention: A (I − S) V, with S a matrix per head or alpha times the symmetric map of the keys.

Teo & Nguyen 2024, arXiv:2406.13762, section "scaled attention". Computed as A (V − S V): S changes the values,
then any kernel may attend.       H heads, M keys, E value width
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.attention.base import Stage, attention_map, attentions
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site


@attentions.register("scaled")
class Scaled(Stage):
    """Scaled attention, A (I − S) V; S begins at 0, which is softmax (Teo & Nguyen 2024, arXiv:2406.13762).

    form="matrix": S is a parameter (H, M, M), which fixes the number of keys. form="alpha": S is one learned
    number, shared by the heads, times softmax(k kᵀ · scale + bias); any number of tokens.
    """

    map_text = "A (I − S); weights may be negative"
    writes = frozenset({"v"})
    matrix: Tensor  # (H, M, M)
    alpha: Tensor  # (1)

    def __init__(self, site: Site, *, form: Literal["matrix", "alpha"] = "matrix") -> None:
        super().__init__()
        self.site_name, self.form = site.name, form
        self.is_self_attention = site.is_self_attention()
        shape = (site.num_heads, site.num_keys, site.num_keys) if form == "matrix" else (1,)
        self.register_parameter(form, nn.Parameter(torch.zeros(shape)))

    def forward(self, heads: Heads) -> Heads:
        if self.form == "matrix":
            self._require_size(heads.v)
            mixed = self.matrix.to(heads.v.dtype) @ heads.v
        else:
            mixed = attend(self._symmetric(heads))
            mixed = self.alpha.to(mixed.dtype) * mixed
        return heads._replace(v=heads.v - mixed)

    def value_mixing(self, heads: Heads) -> Tensor:
        """I − S: (H, M, M) with a matrix, (B, H, M, M) with alpha."""
        if self.form == "matrix":
            self._require_size(heads.v)
            s = self.matrix.to(heads.v.dtype)
        else:
            s = self.alpha.to(heads.v.dtype) * attention_map(self._symmetric(heads))
        return torch.eye(s.shape[-1], dtype=s.dtype, device=s.device) - s

    def _symmetric(self, heads: Heads) -> Heads:
        bias = heads.bias if self.is_self_attention else None
        return heads._replace(q=heads.k, bias=bias, dropout=0.0)

    def _require_size(self, v: Tensor) -> None:
        if v.shape[-2] != self.matrix.shape[-1]:
            raise SurgeryError(
                f"'scaled' at {self.site_name!r} fixes the number of tokens: its matrix is for {self.matrix.shape[-1]} "
                f"keys and met {v.shape[-2]}. Resample it with vitruvius.attention.interpolate, or use form='alpha'."
            )
