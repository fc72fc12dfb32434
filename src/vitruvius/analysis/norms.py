"""Norms: ‖φ(q)‖² and ‖h‖² of every token; equal where attention is a projection (arXiv:2505.07908, section 4).

B batch, H heads, N queries
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius.analysis._kernel import log_attention, log_phi2
from vitruvius.analysis.base import Attended, Statistics, Variant, analyses, precise
from vitruvius.heads import Heads, Site

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of tokens, in the curves log10_phi2_quantiles and log10_h2_quantiles
RELEASED_DIVISOR = 8.0  # √64, a literal in the published script whatever the head width


@analyses.register("norms")
def norms(
    heads: Heads, site: Site | None = None, attended: Attended | None = None, *, variant: Variant = "exact"
) -> Statistics:
    """‖φ(q)‖² and ‖h‖² token by token; `log10_ratio` is the mean of log₁₀(‖φ(q)‖² / ‖h‖²), 0 for a projection.

    q and k are those of the softmax that makes the output: of `rpc`, its last iteration.

    variant: exact; or released, the published script with its fixed divisor 8 and its errors of means.
    """
    if attended is not None:
        heads = attended.softmax()
    log_phi, h2 = token_norms(heads, variant=variant)
    phi2 = log_phi.exp()
    if variant == "released":
        phi2 = phi2.nan_to_num(0.0, posinf=0.0)
    statistics = {
        "log10_ratio": ((log_phi - h2.log()) / math.log(10)).mean(-1),
        "phi2": phi2.mean(-1),
        "h2": h2.mean(-1),
        "phi2_median": phi2.median(-1).values,
        "h2_median": h2.median(-1).values,
        "log10_phi2_quantiles": _quantiles(phi2.log10()),
        "log10_h2_quantiles": _quantiles(h2.log10()),
    }
    if variant == "released":  # the published script compares the means, not the tokens
        phi2, h2 = statistics["phi2"][..., None], statistics["h2"][..., None]
    error = (phi2 - h2).abs()
    return statistics | {
        "error": error.mean(-1),
        "relative_to_h": (error / h2).mean(-1),
        "relative_to_phi": (error / phi2).mean(-1),
    }


def token_norms(heads: Heads, *, variant: Variant = "exact") -> tuple[Tensor, Tensor]:
    """(log ‖φ(q)‖², ‖h‖²), each (B, H, N); `released` divides by 8 in the exponents of φ and by √D in those of h."""
    heads = precise(heads)
    scaled = heads if variant == "exact" else heads._replace(scale=1 / RELEASED_DIVISOR)
    return log_phi2(scaled), (log_attention(heads).exp() @ heads.v).square().sum(-1)


def _quantiles(values: Tensor) -> Tensor:
    """(B, H, N) → (B, H, quantiles)."""
    levels = torch.tensor(QUANTILES, dtype=values.dtype, device=values.device)
    return values.quantile(levels, dim=-1).movedim(0, -1)
