"""Differential attention: one map minus λ times another, so that what both share cancels.

Ye et al. 2024, "Differential Transformer", arXiv:2410.05258; halves as in timm's DiffAttention:
    out = norm((softmax(q₁ k₁ᵀ · √2 scale) − λ softmax(q₂ k₂ᵀ · √2 scale)) v) · (1 − λ₀)
q₁, q₂ are the halves of a head's width, the norm is a root mean square over the value width,
λ = exp(λq₁·λk₁) − exp(λq₂·λk₂) + λ₀ is learned and shared by the heads, λ₀ = 0.8 − 0.6 exp(−0.3 depth).
H heads, D key width, E value width
"""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Kernel, at_least_float32, attention_map, attentions, generator_of
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@attentions.register("differential")
class Differential(Kernel):
    """Differential attention, softmax(q₁k₁ᵀ) − λ softmax(q₂k₂ᵀ), then a norm (Ye et al. 2024, arXiv:2410.05258).

    `depth` is the number of the block, from 0, and sets λ₀; by default the first number in the site's name.
    `seed` draws the four vectors of λ, of deviation 0.1, together with the site's name.
    """

    map_text = "A₁ − λA₂ of its two softmaxes, before the norm; weights may be negative"
    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(self, site: Site, *, depth: int | None = None, seed: int = 0) -> None:
        super().__init__()
        if site.key_dim % 2:
            raise site.unsuitable("differential", "halves the width of each head")
        if depth is None:
            number = re.search(r"\d+", site.name)
            depth = int(number.group()) if number else 0
        if depth < 0:
            raise ConfigError(f"'differential' got depth={depth}; it is the number of a block, 0 or more.")
        self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        generator = generator_of(site, seed)
        for name in VECTORS:
            drawn = 0.1 * torch.randn(site.key_dim // 2, generator=generator)
            self.register_parameter(name, nn.Parameter(drawn))
        self.norm = nn.RMSNorm(site.value_dim, eps=1e-5)

    def forward(self, heads: Heads) -> Tensor:
        first, second = halves(heads)
        return self.finish(attend(first) - self.subtracted().to(heads.v.dtype) * attend(second))

    def finish(self, out: Tensor) -> Tensor:
        weight = self.norm.weight.to(out.dtype)
        return F.rms_norm(out, self.norm.normalized_shape, weight, self.norm.eps) * (1 - self.lambda_start)

    def map(self, heads: Heads) -> Tensor:
        first, second = halves(heads)
        return attention_map(first) - self.subtracted().to(heads.q.dtype) * attention_map(second)

    def subtracted(self) -> Tensor:
        """λ, a number."""
        first = at_least_float32(self.lambda_q1 * self.lambda_k1).sum().exp()
        second = at_least_float32(self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.lambda_start

    def extra_repr(self) -> str:
        return f"lambda_start={self.lambda_start:.3g}"


def halves(heads: Heads) -> tuple[Heads, Heads]:
    """The heads of the two softmaxes: each has half the width and the scale that goes with it."""
    q_1, q_2 = heads.q.chunk(2, -1)
    k_1, k_2 = heads.k.chunk(2, -1)
    scale = heads.scale * math.sqrt(2)
    return heads._replace(q=q_1, k=k_1, scale=scale), heads._replace(q=q_2, k=k_2, scale=scale)
