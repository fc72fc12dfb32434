"""Truncated SVD of q and/or k, sample by sample: the best approximation of lower rank, computed anew each time.

You et al. 2023, "ViTCoD", arXiv:2210.09573, its modes single_head and mix_head.
B batch, H heads, N tokens, D key width, r rank
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.heads import Heads, Site


@attentions.register("truncated")
class Truncated(Stage):
    """Replace q and/or k by their best approximation of lower rank (ViTCoD, You et al. 2023, arXiv:2210.09573).

    mode="single_head" truncates each head's (N, D) matrix, mode="mix_head" the (H, N·D) matrix of all heads; rank
    defaults to half of the full one, rounded up. gradient="projection" holds the principal directions fixed in the
    backward pass (always stable); "exact" differentiates them too. `probability`: in training, the share of samples
    that are truncated; in evaluation all are. `tensors` says which are truncated: "qk", "q" or "k".
    """

    map_text = "the softmax of q and k of lower rank"
    surrogate = ()  # through the principal directions no gradient flows

    def __init__(
        self,
        site: Site,
        *,
        mode: Literal["single_head", "mix_head"] = "single_head",
        rank: int | None = None,
        tensors: Literal["qk", "q", "k"] = "qk",
        gradient: Literal["projection", "exact"] = "projection",
        probability: float = 1.0,
    ) -> None:
        super().__init__()
        self.mode, self.tensors, self.gradient, self.probability = mode, tensors, gradient, probability
        if not 0 < probability <= 1:
            raise ConfigError(f"'truncated' got probability={probability}; it must be above 0 and at most 1.")
        full = site.num_heads if mode == "mix_head" else min(site.key_dim, site.num_keys)
        self.rank = -(-full // 2) if rank is None else rank
        if not 1 <= self.rank <= full:
            raise ConfigError(f"'truncated' got rank={rank}; mode {mode!r} at {site.name!r} has ranks 1 … {full}.")

    def forward(self, heads: Heads) -> Heads:
        low: dict[str, Any] = {name: self._truncate(getattr(heads, name)) for name in self.tensors}
        return heads._replace(**low)

    def _truncate(self, x: Tensor) -> Tensor:
        mixed = self.mode == "mix_head"
        rows = x.flatten(2).mT if mixed else x  # (B, N·D, H) or (B, H, N, D)
        basis = principal_directions(rows if self.gradient == "exact" else rows.detach(), self.rank)
        low = rows @ basis @ basis.mT
        truncated = low.mT.unflatten(-1, x.shape[2:]) if mixed else low
        if not self.training or self.probability == 1:
            return truncated
        chosen = torch.rand(len(x), 1, 1, 1, device=x.device) < self.probability
        return torch.where(chosen, truncated, x)


def principal_directions(rows: Tensor, rank: int) -> Tensor:
    """The `rank` right singular vectors of `rows` (…, n, m) with the largest singular values, (…, m, rank)."""
    with torch.autocast(rows.device.type, enabled=False):
        wide = at_least_float32(rows)
        return torch.linalg.eigh(wide.mT @ wide).eigenvectors[..., -rank:].to(rows.dtype)
