"""Effective rank: exp of the entropy of the singular values (Roy & Vetterli 2007), of q, k, v and the output.

B batch, H heads, N tokens, D width
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("effective_rank")
def effective_rank(heads: Heads, site: Site | None = None, attended: Attended | None = None) -> Statistics:
    """How many dimensions queries, keys, values and outputs really use, from 1 to the head width."""
    heads = precise(heads)
    out = (attended or Attended(heads)).output()
    return {"keys": spread(heads.k), "queries": spread(heads.q), "values": spread(heads.v), "output": spread(out)}


def spread(x: Tensor) -> Tensor:
    """exp(−Σ p log p) with p the singular values divided by their sum; (…, N, D) → (…)."""
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    p = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()
