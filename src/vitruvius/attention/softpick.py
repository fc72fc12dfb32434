"""Softpick: a rectified softmax, relu(eˣ − 1) / Σ |eˣ − 1|; a query may look nowhere, so no key becomes a sink.

Zuhri et al. 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax", arXiv:2504.20966.
Computed with everything divided by e^m, m the largest score or 0. Hidden pairs count nowhere.
B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attention.base import DenseKernel, attentions, hidden, scores
from vitruvius.heads import Heads, Site

TINY = 1e-8  # where every score is exactly 0, as in the published code


@attentions.register("softpick")
class Softpick(DenseKernel):
    """Rectified softmax: scores below 0 get nothing, a query may look nowhere (Zuhri et al. 2025, arXiv:2504.20966)."""

    map_text = "its weights; rows sum to at most one"
    surrogate = ("softmax",)  # through scores below 0 no gradient flows

    def __init__(self, site: Site) -> None:
        super().__init__()

    def map(self, heads: Heads) -> Tensor:
        logits, unseen = scores(heads), hidden(heads)
        largest = logits.detach().amax(-1, keepdim=True).clamp(min=0)
        above = (logits - largest).exp() - (-largest).exp()  # (eˣ − 1) / e^m
        if unseen is not None:
            above = torch.where(unseen, 0.0, above)
        return (above.relu() / (above.abs().sum(-1, keepdim=True) + TINY)).to(heads.v.dtype)
