"""Reconstruction: is attention a projection of φ(q)? J = mean_i ‖φ(q_i)‖² − ‖h_i‖² (arXiv:2406.13762, equation 13).

`exact` the formula; `reproduction` the absolute errors of arXiv:2505.07908; `released` what the first paper's code
computes: the exponents without 1/√D, of which it then shows ln(mean error). B batch, H heads, N queries, D key width.
"""

from __future__ import annotations

from typing import Literal

from vitruvius.analysis._kernel import log_attention, log_phi2
from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.attention.symmetric import standardise as z_score
from vitruvius.heads import Heads, Site

Variant = Literal["exact", "reproduction", "released"]


@analyses.register("reconstruction")
def reconstruction(
    heads: Heads,
    site: Site | None = None,
    attended: Attended | None = None,
    *,
    standardise: bool = False,
    variant: Variant = "exact",
) -> Statistics:
    """‖φ(q)‖² against ‖h‖²: absolute, relative and signed errors; `standardise` z-scores q and k first.

    q and k are those of the softmax that makes the output: of `rpc`, its last iteration.

    standardise: z-score each query and key over its width first, with the scale 1/√D.
    variant: exact, reproduction or released, as the head of this file tells them apart.
    """
    heads = precise(heads if attended is None else attended.softmax())
    if standardise:
        heads = heads._replace(q=z_score(heads.q), k=z_score(heads.k), scale=heads.k.shape[-1] ** -0.5)
    weights = log_attention(heads)
    h2 = (weights.exp() @ heads.v).square().sum(-1)  # (B, H, N)
    log_phi = log_phi2(heads)
    if variant == "released":  # q·q − 2 q·k_0 + 2 log a_0, with k_0 the first key and a_0 the attention to it
        first = (heads.q @ heads.k[..., :1, :].mT).squeeze(-1)  # (B, H, N)
        log_phi = heads.q.square().sum(-1) - 2 * first + 2 * weights[..., 0]
    phi2 = log_phi.exp()
    error, tiny = (phi2 - h2).abs(), 0.0 if variant == "exact" else 1e-8
    by_token = {
        "error": error,
        "relative_to_h": error / (h2 + tiny),
        "relative_to_phi": error / (phi2 + tiny),
        "h2": h2,
        "phi2": phi2,
        "signed_error": phi2 - h2,
    }
    return {name: values.mean(-1) for name, values in by_token.items()}
