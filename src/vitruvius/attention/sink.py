"""Attention with a sink: one more logit in the denominator, so that a query may look nowhere.

    out = Σ_j exp(x_j) v_j / (exp(sink) + Σ_j exp(x_j)),   x = q kᵀ · scale + bias
With sink = 0 this is softmax-one; as a number learned for each head it is what gpt-oss does (OpenAI 2025,
arXiv:2508.10925) and StreamingLLM's learnable sink (Xiao et al. 2024, arXiv:2309.17453) without its value.
Computed by PyTorch's fused kernel with one more key and the value 0.
B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Kernel, attention_map, attentions
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site


@attentions.register("sink")
class Sink(Kernel):
    """Softmax with one more logit per head, learned or fixed, and no value behind it (gpt-oss, arXiv:2508.10925).

    `start` is the logit at the beginning: 0 is softmax-one, −∞ would be softmax. learned=False keeps it.
    """

    map_text = "its weights without the sink; rows sum to less than one"
    logit: Tensor  # (H)

    def __init__(self, site: Site, *, start: float = 0.0, learned: bool = True) -> None:
        super().__init__()
        if not math.isfinite(start):
            raise ConfigError(f"'sink' got start={start}; it must be finite (-30 is as good as no sink at all).")
        logit = torch.full((site.num_heads,), float(start))
        if learned:
            self.register_parameter("logit", nn.Parameter(logit))
        else:
            self.register_buffer("logit", logit)

    def forward(self, heads: Heads) -> Tensor:
        return attend(self._with_sink(heads))

    def map(self, heads: Heads) -> Tensor:
        return attention_map(self._with_sink(heads))[..., :-1]

    def _with_sink(self, heads: Heads) -> Heads:
        """One more key, whose score is the sink's logit whatever the query, and whose value is 0."""
        H, M = self.logit.shape[0], heads.k.shape[-2]
        sink = self.logit.to(heads.q.dtype)[:, None, None]  # (H, 1, 1)
        if heads.bias is None:
            bias = sink.new_zeros(1, M).expand(H, -1, -1)
        else:
            missing_axes = (1,) * (4 - heads.bias.dim())
            bias = heads.bias.reshape(missing_axes + tuple(heads.bias.shape)).expand(-1, H, -1, M)
        bias = torch.cat([bias, sink.expand(*bias.shape[:-1], 1)], -1)
        return heads._replace(k=F.pad(heads.k, (0, 0, 0, 1)), v=F.pad(heads.v, (0, 0, 0, 1)), bias=bias)
