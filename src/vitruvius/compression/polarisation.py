"""Polarisation: tokens that many queries look at move to the front, so that a mask has a dense and a sparse part.

You et al. 2023, "ViTCoD", arXiv:2210.09573, section IV-B, as released: reorder.py.       H heads, N tokens; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._format import DASH, format_table


@dataclass(frozen=True, kw_only=True)
class Polarised:
    """The masks of one site with the tokens of each head in a new order, global ones first."""

    keep: Tensor  # bool (H, N, N), in the new order
    order: Tensor  # int64 (H, N): which token stands at each place
    num_global: Tensor  # int64 (H)

    @property
    def dense_kept(self) -> Tensor:
        """Kept pairs among the columns of global tokens, (H)."""
        return torch.stack([k[:, :g].sum() for k, g in zip(self.keep, self.num_global.tolist(), strict=True)])

    @property
    def kept(self) -> Tensor:
        """Kept pairs, (H)."""
        return self.keep.sum((-2, -1))

    @property
    def densities(self) -> tuple[Tensor, Tensor]:
        """Share kept of the denser and of the sparser part, each (H); nan where a part has no columns."""
        N = self.keep.shape[-1]
        dense, rest = self.num_global * N, (N - self.num_global) * N
        return self.dense_kept / dense, (self.kept - self.dense_kept) / rest


def polarise(keep: Tensor, *, threshold: int | None = None) -> Polarised:
    """A token is global in a head if more than `threshold` queries keep it as a key.

    The published threshold is 50 of 14 × 14 patches and a class token; by default a quarter of the tokens.

    `keep` is a mask (H, N, N), True = kept.
    """
    if keep.ndim != 3 or keep.shape[-2] != keep.shape[-1]:
        raise ConfigError(
            f"polarise got a mask of shape {tuple(keep.shape)}; queries and keys are permuted together, so it needs "
            "(heads, tokens, tokens)."
        )
    if threshold is None:
        threshold = keep.shape[-1] // 4
    is_global = keep.sum(-2) > threshold  # (H, N)
    order = torch.stack([_front(chosen) for chosen in is_global])
    moved = torch.stack([k[o][:, o] for k, o in zip(keep, order, strict=True)])
    return Polarised(keep=moved, order=order, num_global=is_global.sum(-1))


def polarise_all(keep: Mapping[str, Tensor], *, threshold: int | None = None) -> dict[str, Polarised]:
    """`polarise` at every site whose queries are its keys; others have nothing to permute and are left out."""
    square = {name: pattern for name, pattern in keep.items() if pattern.shape[-2] == pattern.shape[-1]}
    return {name: polarise(pattern, threshold=threshold) for name, pattern in square.items()}


def _front(chosen: Tensor) -> Tensor:
    """The order after swapping the i-th chosen token with whatever stands at place i, (N)."""
    order = list(range(len(chosen)))
    for place, token in enumerate(chosen.nonzero().flatten().tolist()):
        at = order.index(token)
        order[place], order[at] = order[at], order[place]
    return torch.tensor(order)


def describe(polarised: Mapping[str, Polarised]) -> str:
    """Global tokens and densities, one line per site."""
    rows = []
    for name, one in polarised.items():
        shares = (DASH if d.isnan().all() else f"{100 * d.double().nanmean():.1f} %" for d in one.densities)
        rows.append([name, " ".join(map(str, one.num_global.tolist())), *shares])
    return "\n".join(format_table(["site", "global tokens by head", "denser part", "sparser part"], rows))
