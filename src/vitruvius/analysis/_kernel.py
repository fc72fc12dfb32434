"""The kernel of self-attention seen as kernel PCA (Teo & Nguyen 2024, arXiv:2406.13762), in float64 and in logarithms.

κ(x, y) = exp(x·y · scale), g(x) = Σ_j κ(x, k_j), φ(x) = κ(x, ·) / g(x); the Gram matrix of φ at the keys is
κ(k_i, k_j) / (g_i g_j). B batch, H heads, N queries, M keys, D key width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius.attention.base import scores
from vitruvius.attention.symmetric import standardise as z_score
from vitruvius.heads import Heads

RELEASED_EPSILON = 1e-6  # the published scripts add it to g gᵀ


class Gram(NamedTuple):
    """The centred Gram matrix of the keys' features, and the logarithm of each key's mass g."""

    centred: Tensor  # (B, H, M, M)
    log_mass: Tensor  # (B, H, M)


def key_gram(heads: Heads, *, standardise: bool, released: bool = False) -> Gram:
    """The centred Gram matrix; of standardised keys with the papers' scale 1/√D, else with the model's own."""
    keys, scale = heads.k, heads.scale
    if standardise:
        keys, scale = z_score(keys), keys.shape[-1] ** -0.5
    if standardise and released:  # (x − mean) / (unbiased deviation + 1e-8), as the published scripts do
        keys = (heads.k - heads.k.mean(-1, keepdim=True)) / (heads.k.std(-1, keepdim=True) + 1e-8)
    logits = (keys * scale) @ keys.mT  # (B, H, M, M)
    log_mass = logits.logsumexp(-1)
    if released:
        norm = log_mass[..., :, None] + log_mass[..., None, :]
        logits -= torch.logaddexp(norm, norm.new_tensor(math.log(RELEASED_EPSILON)))
    else:
        logits -= log_mass[..., :, None]
        logits -= log_mass[..., None, :]
    return Gram(centred(logits.exp_()), log_mass)


def centred(gram: Tensor) -> Tensor:
    """(I − 1/M) K (I − 1/M)."""
    rows = gram.mean(-1, keepdim=True)
    return gram - rows - gram.mean(-2, keepdim=True) + rows.mean(-2, keepdim=True)


def log_attention(heads: Heads) -> Tensor:
    """log softmax(q kᵀ · scale + bias), (B, H, N, M)."""
    return scores(heads).log_softmax(-1)


def log_phi2(heads: Heads) -> Tensor:
    """log ‖φ(q_i)‖² = q_i·q_i · scale − 2 log g(q_i), (B, H, N); g is what the softmax divides by, bias included."""
    return heads.q.square().sum(-1) * heads.scale - 2 * scores(heads).logsumexp(-1)
