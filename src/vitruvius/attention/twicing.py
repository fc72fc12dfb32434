"""Twicing attention: what one pass of attention leaves over is attended once more, (2A − A²) v = Av + A (v − Av).

Abdullaev & Nguyen 2025, "Transformer Meets Twicing: Harnessing Unattended Residual Information", arXiv:2503.00687.
B batch, H heads, N tokens
"""

from __future__ import annotations

import math

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Kernel, attention_map, attentions
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site


@attentions.register("twicing")
class Twicing(Kernel):
    """Twicing, (2A − A²) v: attention once more over what it left (Abdullaev & Nguyen 2025, arXiv:2503.00687).

    `strength` multiplies the second pass: 1 is the paper's, 0 is softmax.
    """

    map_text = "2A − A²; weights may be negative"
    surrogate = ("softmax",)  # one pass of attention

    def __init__(self, site: Site, *, strength: float = 1.0) -> None:
        super().__init__()
        site.require_self_attention("twicing")
        if not math.isfinite(strength):
            raise ConfigError(f"'twicing' got strength={strength}; it must be finite (1: the paper's, 0: softmax).")
        self.strength = strength

    def forward(self, heads: Heads) -> Tensor:
        once = attend(heads)
        return once + self.strength * (once - attend(heads._replace(v=once)))

    def map(self, heads: Heads) -> Tensor:
        once = attention_map(heads)
        return once + self.strength * (once - once @ once)
