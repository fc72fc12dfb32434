"""Attention whose weights need not sum to one, so that a query may look nowhere: with a sink, a sigmoid, softpick.

sink      exp(x_j) / (exp(sink) + Σ_j exp(x_j)): one more logit, whose value is 0. With sink = 0 this is softmax-one;
          learned for each head it is what gpt-oss does (OpenAI 2025, arXiv:2508.10925) and StreamingLLM's learnable
          sink (Xiao et al. 2024, arXiv:2309.17453) without its value. Computed by PyTorch's fused kernel with one key
          more.
sigmoid   sigmoid(x_j + b), b = −log M (Ramapuram et al. 2024, arXiv:2409.04431)
softpick  relu(exp(x_j) − 1) / Σ |exp(x_j) − 1| (Zuhri et al. 2025, arXiv:2504.20966), everything divided by e^m, m the
          largest score or 0; hidden pairs count nowhere

x = q kᵀ · scale + bias. B batch, H heads, N queries, M keys
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.base import DenseKernel, Kernel, attention_map, attentions, hidden, scores
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


@attentions.register("sigmoid")
class Sigmoid(DenseKernel):
    """Sigmoid attention: no sum over keys, weights need not add to one (Ramapuram et al. 2024, arXiv:2409.04431).

    `offset` is added to every score; by default −log(number of keys), so that small scores begin with weights 1/M.
    """

    map_text = "its weights, which do not sum to one"
    surrogate = ("softmax",)  # a sigmoid saturates

    def __init__(self, site: Site, *, offset: float | None = None) -> None:
        super().__init__()
        if offset is not None and not math.isfinite(offset):
            raise ConfigError(f"'sigmoid' got offset={offset}; it is added to every score and must be finite.")
        self.offset = offset

    def map(self, heads: Heads) -> Tensor:
        offset = -math.log(heads.k.shape[-2]) if self.offset is None else self.offset
        return (scores(heads) + offset).sigmoid().to(heads.v.dtype)


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
