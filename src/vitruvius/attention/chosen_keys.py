"""Attention that looks at some keys only, chosen by the scores: the largest ones, or those that entmax leaves.

top_k   keeps the keys of the largest scores (Zhao et al. 2019, "Explicit Sparse Transformer", arXiv:1912.11637; for
        vision Wang et al. 2022, "KVT", arXiv:2106.00515) and hides the others before the softmax
entmax  p = relu(x/2 − τ)² with Σ p = 1 (α = 1.5; Peters, Niculae & Martins 2019, arXiv:1905.05702), exact by sorting.
        Gradients of any order take τ as a function of the keys that are chosen: no derivative of the sort is needed.

B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import DenseKernel, Stage, attentions, scores
from vitruvius.heads import Heads, Site


@attentions.register("top_k")
class TopK(Stage):
    """Each query keeps the keys of its largest scores (Zhao et al. 2019, arXiv:1912.11637; KVT, arXiv:2106.00515).

    `share` of the keys is kept, rounded up; 1 keeps all. Keys as good as the last one kept are kept too. Which keys
    are kept is decided anew for every image; through what is hidden no gradient flows.
    """

    map_text = "the softmax of the largest scores; other keys are 0"
    surrogate = ()  # through hidden keys no gradient flows
    writes = frozenset({"choice of keys"})

    def __init__(self, site: Site, *, share: float = 0.5) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ConfigError(f"'top_k' got share={share}; it must be above 0 and at most 1.")
        self.share = share

    def forward(self, heads: Heads) -> Heads:
        with torch.no_grad():
            logits = scores(heads)
            number = math.ceil(self.share * logits.shape[-1])
            last = logits.topk(number, dim=-1).values[..., -1:]
            lost = torch.zeros_like(logits).masked_fill(logits < last, -torch.inf).to(heads.q.dtype)
        return heads.add_bias(lost)


@attentions.register("entmax")
class Entmax(DenseKernel):
    """Entmax with α = 1.5 in place of softmax: weights of exactly 0 (Peters et al. 2019, arXiv:1905.05702)."""

    map_text = "its entmax weights; keys that are not chosen are 0"
    surrogate = ("softmax",)  # through weights of 0 no gradient flows

    def __init__(self, site: Site) -> None:
        super().__init__()

    def map(self, heads: Heads) -> Tensor:
        return entmax(scores(heads)).to(heads.v.dtype)


def entmax(x: Tensor) -> Tensor:
    """1.5-entmax of scores `x` (…, M) along the last axis; −∞ hides a key."""
    half = (x - x.detach().amax(-1, keepdim=True)).clamp(min=-4) / 2  # below −2 nothing is ever chosen
    with torch.no_grad():
        tau = threshold(half)
        chosen = half > tau
    moving = chosen_threshold(half, chosen)
    return (half - tau - (moving - moving.detach())).relu().square()


def chosen_threshold(half: Tensor, chosen: Tensor) -> Tensor:
    """τ again, (…, 1), as a smooth function: mean − √((1 − Σ (half − mean)²) / k) of the k keys that are chosen."""
    count = chosen.sum(-1, keepdim=True)
    mean = half.where(chosen, 0.0).sum(-1, keepdim=True) / count
    spread = (half - mean).where(chosen, 0.0).square().sum(-1, keepdim=True)  # at most 1 − 1/k
    return mean - ((1 - spread) / count).sqrt()


def threshold(half: Tensor) -> Tensor:
    """τ with Σ relu(half − τ)² = 1, (…, 1): of the first k scores in order it is mean − √((1 − k var) / k)."""
    ordered = half.sort(-1, descending=True).values
    count = torch.arange(1, half.shape[-1] + 1, dtype=half.dtype, device=half.device)
    mean = ordered.cumsum(-1) / count
    spread = ordered.square().cumsum(-1) - count * mean.square()
    taus = mean - ((1 - spread) / count).clamp(min=0).sqrt()
    chosen = (taus <= ordered).sum(-1, keepdim=True)  # a prefix of the order
    return taus.gather(-1, chosen - 1)
