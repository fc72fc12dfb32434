"""Symmetric attention, where the keys ask the questions, softmax(k kᵀ · scale) v; and standardised queries and keys.

Teo & Nguyen 2024, arXiv:2406.13762 ("SymViT"). Its reconstruction experiments, and those of arXiv:2505.07908, train
with each token's q and k brought to mean 0 and standard deviation 1 over the head width.
H heads, D key width, C model width
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import SurgeryError
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.heads import Heads, HeadWeights, Site


@attentions.register("symmetric")
class Symmetric(Stage):
    """Keys take the place of the queries: symmetric before the softmax (Teo & Nguyen 2024, arXiv:2406.13762)."""

    map_text = "softmax(k kᵀ)"
    discards = frozenset({"q"})

    def __init__(self, site: Site) -> None:
        super().__init__()
        require_keys_can_ask("symmetric", site)

    def forward(self, heads: Heads) -> Heads:
        return heads._replace(q=heads.k)


# What the queries of some families bring along beside their projection; without q it would be lost, untrained.
QUERY_CARRIES = {
    "xcit": "the learned temperature",
    "swin_v2": "the learned temperature",
    "swin_v2_cr": "the learned temperature",
    "cait": "the mixing of heads before the softmax",
}


def require_keys_can_ask(part: str, site: Site, remedy: str = "") -> None:
    """Refuse a `site` where a key cannot stand in for a query; `remedy` is a sentence that says what else to do."""
    site.require_self_attention(part)
    if site.family in QUERY_CARRIES:
        lost = QUERY_CARRIES[site.family]
        raise site.unsuitable(part, f"replaces q by k, and {lost} that q carries would be lost, untrained", remedy)


@torch.no_grad()
def symmetrise(weights: HeadWeights) -> None:
    """Rewrite the key projection so that k·k comes as near to the pretrained q·k as a symmetric form can.

    With x̃ = (x, 1), q·k is x̃ᵀ G ỹ. Of all K̃ᵀK̃ of rank at most D the nearest to G (Frobenius) is made of
    the D largest positive eigenpairs of (G + Gᵀ)/2. Without biases G has no row and column for the 1.
    """
    if (weights.q_bias is None) != (weights.k_bias is None):
        raise SurgeryError("symmetrise needs biases on both q and k, or on neither; this site has one of them.")
    q, k = _augmented(weights.q, weights.q_bias), _augmented(weights.k, weights.k_bias)  # (H, D, C + 1)
    form = q.mT @ k  # (H, C + 1, C + 1)
    if not form.isfinite().all():
        raise SurgeryError("symmetrise found weights that are not finite; the checkpoint is damaged.")
    values, vectors = torch.linalg.eigh((form + form.mT) / 2)
    width = min(q.shape[1], values.shape[-1])
    root = values[:, -width:].clamp(min=0).sqrt()  # (H, D)
    best = k.new_zeros(k.shape)
    best[:, :width] = root[..., None] * vectors[..., -width:].mT
    weights.k.copy_(best[..., : weights.k.shape[-1]])
    if weights.k_bias is not None:
        weights.k_bias.copy_(best[..., -1])


def _augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """(H, D, C) and (H, D) side by side, in float64."""
    return (weight if bias is None else torch.cat([weight, bias[..., None]], -1)).double()


@attentions.register("standardised")
class Standardised(Stage):
    """Z-scored q and k, so that q·q = D − 1 for every token (Teo & Nguyen 2024, arXiv:2406.13762)."""

    map_text = "the softmax of standardised q and k"

    def __init__(self, site: Site) -> None:
        super().__init__()
        site.require("standardised", "tokens", "windows", "class", "downsampled")
        if "temperature" in QUERY_CARRIES.get(site.family, ""):
            raise site.unsuitable(
                "standardised", f"would cancel {QUERY_CARRIES[site.family]} that q carries, untrained"
            )
        if site.key_dim < 2:
            raise site.unsuitable("standardised", "needs keys of width 2 or more")

    def forward(self, heads: Heads) -> Heads:
        return heads._replace(q=standardise(heads.q), k=standardise(heads.k))


def standardise(x: Tensor) -> Tensor:
    """(x − mean) / unbiased standard deviation over the last axis of `x`; a constant row becomes zeros."""
    wide = at_least_float32(x)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    constant = variance <= (torch.finfo(wide.dtype).eps * mean).square()  # nothing but rounding varies
    return ((wide - mean) * variance.masked_fill(constant, torch.inf).rsqrt()).to(x.dtype)
