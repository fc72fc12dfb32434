"""Gammas: if the columns of V came from eigenvectors a of the centred Gram matrix, (K a)_i / (N a_i) would not depend
on the token i (arXiv:2406.13762, section 2.3; arXiv:2505.07908, section 5).

`paper` takes a = (I − 1/N) diag(g) V, the pseudo-inverse of V = diag(1/g) (I − 1/N) a. `reproduction` takes the
eigenvectors themselves, for which gammas are constant by construction; `released` disturbs those first.
B batch, H heads, N tokens, K columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitruvius._checks import check_weight
from vitruvius.analysis._kernel import Gram, key_gram
from vitruvius.analysis.base import Statistics, analyses, precise
from vitruvius.heads import Heads

Variant = Literal["paper", "reproduction", "released"]


@analyses.register("gammas")
def gammas(
    heads: Heads, *, variant: Variant = "paper", standardise: bool = True, noise: float = 0.1, seed: int = 0
) -> Statistics:
    """How far gamma is from constant over tokens; `alignment` is |cos(K a, a)|, 1 for eigenvectors.

    variant: paper, reproduction or released, as the head of this file tells them apart.
    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    noise: of `released` only: strength of what disturbs the eigenvectors, in units of their entries.
    seed: of that noise; the same for every image.
    """
    check_weight(noise, "'gammas' got noise")
    heads = precise(heads)
    gram = key_gram(heads, standardise=standardise, released=variant != "paper")
    columns = _columns(heads, gram, variant, noise, seed)  # (B, H, N, K)
    moved = gram.centred @ columns
    values = moved / (columns.shape[-2] * columns)
    over_pairs = pairwise(values.mT)  # each (B, H, K)
    cosine = torch.cosine_similarity(moved, columns, dim=-2).abs()
    return {
        "alignment": cosine.mean(-1),
        **{name: each.mean(-1) for name, each in over_pairs.items()},
        **{f"{name}_by_column": each for name, each in over_pairs.items()},
        "alignment_by_column": cosine,
    }


def pairwise(values: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased deviation over pairs of |x_i − x_j| and of |x_i − x_j| / (max(|x_i|, |x_j|) + 1e-10).

    Along the last axis, in O(N log N): ordered by |x|, the pairs of x_j with all before it are cumulative sums.
    """
    ordered = values.sort(-1).values
    middle = ordered[..., (values.shape[-1] - 1) // 2, None]  # differences from it are the same, rounding is smaller
    x = values.gather(-1, values.abs().argsort(-1))
    offset = x - middle
    before = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    first, second = offset.cumsum(-1) - offset, offset.square().cumsum(-1) - offset.square()
    distance = (before * offset - first) * x.sign()  # Σ_{i<j} |x_j − x_i|
    square = (before * offset.square() - 2 * offset * first + second).clamp(min=0)  # Σ_{i<j} (x_j − x_i)²
    rank = 2 * before - (x.shape[-1] - 1)  # Σ rank · x of ascending numbers is Σ_{i<j} |x_i − x_j|
    size = x.abs() + 1e-10
    pairs = x.shape[-1] * (x.shape[-1] - 1) / 2
    relative = _moments((distance / size).sum(-1), (square / size.square()).sum(-1), pairs)
    absolute = _moments((rank * (ordered - middle)).sum(-1), square.sum(-1), pairs)
    return dict(zip(("relative", "relative_std", "absolute", "absolute_std"), (*relative, *absolute), strict=True))


def disturbed(columns: Tensor, noise: Tensor, strength: float) -> Tensor:
    """Orthonormal columns (…, N, K) near the given ones: the Q factor of columns + strength · noise."""
    return torch.linalg.qr(columns + strength * noise).Q


def _columns(heads: Heads, gram: Gram, variant: Variant, noise: float, seed: int) -> Tensor:
    if variant == "paper":
        mass = (gram.log_mass - gram.log_mass.amax(-1, keepdim=True)).exp()  # gammas do not feel a common factor
        weighted = mass[..., None] * heads.v
        return weighted - weighted.mean(-2, keepdim=True)
    columns = torch.linalg.eigh(gram.centred).eigenvectors.flip(-1)[..., : heads.k.shape[-1]]
    if variant == "reproduction":
        return columns
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(columns.shape[1:], generator=generator, dtype=columns.dtype)  # the same for every image
    return disturbed(columns, drawn.to(columns), noise)


def _moments(total: Tensor, squares: Tensor, count: float) -> tuple[Tensor, Tensor]:
    mean = total / count
    return mean, ((squares - count * mean.square()).clamp(min=0) / max(count - 1, 1)).sqrt()
