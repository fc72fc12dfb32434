"""How much a mask removes: in all, by site and by head, with and without the rows and columns of protected tokens.

H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Share:
    """Pairs and kept pairs, of all and of those between tokens that are not protected."""

    kept: int
    pairs: int
    kept_inside: int
    pairs_inside: int

    @property
    def sparsity(self) -> float:
        """Share of all pairs that is removed."""
        return 1 - self.kept / max(self.pairs, 1)

    @property
    def sparsity_inside(self) -> float:
        """The same without protected rows and columns."""
        return 1 - self.kept_inside / max(self.pairs_inside, 1)

    def __add__(self, other: Share) -> Share:
        return Share(
            kept=self.kept + other.kept,
            pairs=self.pairs + other.pairs,
            kept_inside=self.kept_inside + other.kept_inside,
            pairs_inside=self.pairs_inside + other.pairs_inside,
        )


@dataclass(frozen=True)
class Sparsity:
    """Shares of every head of every site."""

    heads: dict[str, list[Share]]

    @property
    def total(self) -> Share:
        return total([share for heads in self.heads.values() for share in heads])

    def __str__(self) -> str:
        width = max(len("site"), *(len(name) for name in self.heads))
        lines = [f"{'site':<{width}}  removed   unprotected  by head", "-" * (width + 32)]
        for name, heads in {**self.heads, "all": []}.items():
            share = total(heads) if heads else self.total
            by_head = " ".join(f"{100 * head.sparsity:.1f}" for head in heads)
            line = f"{name:<{width}}  {100 * share.sparsity:6.2f} %  {100 * share.sparsity_inside:8.2f} %  {by_head}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def count(keep: Mapping[str, Tensor], protected: Mapping[str, Sequence[int]] | None = None) -> Sparsity:
    """Count the pairs of every head; `protected` names tokens by site.

    `keep` are masks (H, N, M) by site, True = kept.
    """
    tokens = protected or {}
    return Sparsity({name: [_share(head, tokens.get(name, ())) for head in pattern] for name, pattern in keep.items()})


def total(shares: Sequence[Share]) -> Share:
    """The sum of all."""
    return sum(shares, Share(kept=0, pairs=0, kept_inside=0, pairs_inside=0))


def _share(pattern: Tensor, tokens: Sequence[int]) -> Share:
    """Of one head, (N, M)."""
    queries, keys = pattern.shape
    inside = torch.ones(keys, dtype=torch.bool)
    inside[list(tokens)] = False
    rows = inside if queries == keys else torch.ones(queries, dtype=torch.bool)
    core = pattern[rows][:, inside]
    return Share(kept=int(pattern.sum()), pairs=pattern.numel(), kept_inside=int(core.sum()), pairs_inside=core.numel())
