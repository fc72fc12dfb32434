"""Gated attention: every head's output times a sigmoid of the token that asked, y ⊙ sigmoid(x W + b).

Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv:2505.06708, its gate on the attention's output, one
for each head and channel. timm's `gated=True` has the same gate behind its output norm.
B batch, H heads, N queries, E value width, C model width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius.attention.base import Kernel, attention_map, attentions, generator_of
from vitruvius.attention.softmax import attend
from vitruvius.heads import Context, Heads, Site


@attentions.register("gated")
class Gated(Kernel):
    """Softmax attention, then a sigmoid gate made of the token that asks (Qiu et al. 2025, arXiv:2505.06708).

    `start` is the gate's bias at the beginning: 0 halves the output, 40 is softmax. `seed` draws its weights, of
    deviation 0.02, together with the site's name.
    """

    map_text = "its softmax, before the gate"
    needs_tokens = True

    def __init__(self, site: Site, *, start: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        if site.attends in ("channels", "downsampled"):
            raise site.unsuitable("gated", "gates the output of each token")
        if not math.isfinite(start):
            raise ConfigError(f"'gated' got start={start}; it must be finite (40 is as good as no gate at all).")
        shape = (site.num_heads * site.value_dim, site.dim)
        self.weight = nn.Parameter(0.02 * torch.randn(shape, generator=generator_of(site, seed)))
        self.bias = nn.Parameter(torch.full(shape[:1], float(start)))
        self.site_name = site.name

    def forward(self, heads: Heads, context: Context = Context()) -> Tensor:  # noqa: B008
        return attend(heads) * self.gate(heads, context)

    def gate(self, heads: Heads, context: Context) -> Tensor:
        """Between 0 and 1, (B, H, N, E), for the tokens that ask."""
        if context.x is None:
            raise SurgeryError(f"'gated' at {self.site_name!r} was called without the tokens that ask.")
        gates = nn.functional.linear(context.x, self.weight.to(context.x.dtype), self.bias.to(context.x.dtype))
        return gates.unflatten(-1, (heads.q.shape[1], -1)).transpose(1, 2).sigmoid()

    def map(self, heads: Heads) -> Tensor:
        return attention_map(heads)
