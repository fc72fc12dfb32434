"""Token norms: outliers among the tokens, and where attention gathers, as registers and sinks do (Darcet et al. 2024,
arXiv:2309.16588). B batch, H heads, N queries, M keys.
"""

from __future__ import annotations

import torch

from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("token_norms")
def token_norms(heads: Heads, site: Site, attended: Attended | None = None) -> Statistics:
    """Lengths of keys, values and outputs, their largest over their median, and the share of the strongest sink."""
    heads = precise(heads)
    attended = attended or Attended(heads)
    received = attended.shares().mean(-2)  # (B, H, M)
    sets = {"key": heads.k, "value": heads.v, "output": attended.output()}
    lengths = {name: torch.linalg.vector_norm(x, dim=-1) for name, x in sets.items()}
    gap = lengths["value"] - lengths["value"].median(-1, keepdim=True).values
    robust = 1.4826 * gap.abs().median(-1, keepdim=True).values  # outliers: longer than the median by more than five
    return {
        "sink": received.amax(-1),
        **{f"{name}_peak": each.amax(-1) / each.median(-1).values for name, each in lengths.items()},
        **{name: each.mean(-1) for name, each in lengths.items()},
        "outliers": (gap > 5 * robust).double().mean(-1),
        **({"prefix": received[..., : site.num_prefix_tokens].sum(-1)} if site.num_prefix_tokens else {}),
    }
