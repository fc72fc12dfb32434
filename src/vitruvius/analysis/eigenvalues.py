"""Eigenvalues of the centred Gram matrix of the keys: what kernel PCA calls variance (arXiv:2406.13762, section 2).

All lie between 0 and the trace, and the trace is at most the number of keys, so the published maximum of 648 for 197
keys cannot be. B batch, H heads, M keys, D key width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis._kernel import key_gram
from vitruvius.analysis.base import Statistics, Variant, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("eigenvalues")
def eigenvalues(heads: Heads, *, standardise: bool = True, variant: Variant = "exact") -> Statistics:
    """Spectrum of the centred Gram matrix of the keys: its D largest eigenvalues.

    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    variant: exact; or released, which adds 1e-6 and takes absolute values as the published script does.
    """
    values = spectrum(heads, standardise=standardise, variant=variant)  # (B, H, K)
    return {**_summary(values), "first_share": values.amax(-1) / values.sum(-1), "spectrum": values}


@analyses.register("eigenvalues_by_rank")
class EigenvaluesByRank:
    """The published summary: eigenvalues of each rank averaged over heads and layers, then max, min, mean, median.

    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    variant: released, as the published script counts; or exact, without its 1e-6 and absolute values.
    """

    def __init__(self, *, standardise: bool = True, variant: Variant = "released") -> None:
        self.standardise, self.variant = standardise, variant
        self.sums: Tensor | None = None
        self.count = 0

    def see(self, heads: Heads, site: Site) -> None:
        site.require("eigenvalues_by_rank", "tokens")
        values = spectrum(heads, standardise=self.standardise, variant=self.variant)
        if self.sums is not None and self.sums.shape[-1] != values.shape[-1]:
            raise UnsuitableSite(
                f"'eigenvalues_by_rank' averages {self.sums.shape[-1]} ranks; {site.name!r} has {values.shape[-1]}."
            )
        over_heads = values.sum(1)  # (B, K)
        self.sums = over_heads if self.sums is None else self.sums + over_heads
        self.count += values.shape[1]

    def result(self) -> dict[str, Tensor]:
        assert self.sums is not None
        return _summary(self.sums / self.count)


def _summary(values: Tensor) -> dict[str, Tensor]:
    """Over the last axis."""
    median = values.median(-1).values
    return {"max": values.amax(-1), "min": values.amin(-1), "mean": values.mean(-1), "median": median}


def spectrum(heads: Heads, *, standardise: bool, variant: Variant = "exact") -> Tensor:
    """The min(D, M) largest eigenvalues, descending; `released` adds 1e-6 to g gᵀ and takes absolute values."""
    heads, released = precise(heads), variant == "released"
    gram = key_gram(heads, standardise=standardise, released=released).centred
    values = torch.linalg.eigvalsh(gram).flip(-1)[..., : heads.k.shape[-1]]
    return values.abs() if released else values.clamp(min=0)  # below zero is rounding: it is a Gram matrix
