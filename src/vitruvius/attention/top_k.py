"""Top-k attention: each query keeps the keys of its largest scores, the others are hidden before the softmax.

Zhao et al. 2019, "Explicit Sparse Transformer", arXiv:1912.11637; for vision Wang et al. 2022, "KVT", arXiv:2106.00515.
B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import math

import torch

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, attentions, scores
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
        return heads._replace(bias=lost if heads.bias is None else heads.bias + lost)

    def extra_repr(self) -> str:
        return f"share={self.share}"
