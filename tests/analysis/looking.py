"""Heads to look at, golden tensors, and plain loops to compare with."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from vitruvius.heads import Heads, Site

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"kpca_{name}.safetensors")


def layers(tensors: dict[str, Tensor]) -> list[Heads]:
    """The layers of a golden file: q, k, v are (L, B, H, N, D)."""
    scale = tensors["q"].shape[-1] ** -0.5
    return [Heads(q, k, v, scale=scale) for q, k, v in zip(tensors["q"], tensors["k"], tensors["v"], strict=True)]


def make_heads(
    batch: int = 2, heads: int = 3, tokens: int = 9, width: int = 4, seed: int = 0, value_width: int | None = None
) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens)
    q, k = (torch.randn(*shape, width, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(*shape, value_width or width, generator=generator, dtype=torch.float64)
    return Heads(q, k, v, scale=width**-0.5)


def make_site(heads: Heads, **changes: object) -> Site:
    (_, h, n, d), (m, e) = heads.q.shape, heads.v.shape[2:]
    sizes = {"num_heads": h, "num_queries": n, "num_keys": m, "key_dim": d, "value_dim": e, "dim": h * d}
    return Site(**{"name": "blocks.0.attn", "family": "vit", "attends": "tokens", **sizes, **changes})


def wave_heads() -> Heads:
    """The closed-form inputs of the specification: B 2, H 2, N 5, D 4."""
    b, i, c = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (2, 5, 8)), indexing="ij")
    k = 1.5 * torch.sin(0.37 * (i + 1) * (c + 1) + 0.9 * b)
    v = torch.cos(0.23 * (i + 1) + 0.5 * (c + 1) - 0.4 * b)
    q = 1.2 * torch.cos(0.31 * (i + 1) * (c + 1) - 0.2 * b)
    q, k, v = (x.view(2, 5, 2, 4).transpose(1, 2) for x in (q, k, v))
    return Heads(q, k, v, scale=0.5)


def slow_gram(keys: Tensor, scale: float) -> Tensor:
    """The centred Gram matrix of one head, entry by entry, by the definition."""
    n = len(keys)
    kappa = [[math.exp(float(keys[i] @ keys[j]) * scale) for j in range(n)] for i in range(n)]
    mass = [sum(row) for row in kappa]
    gram = torch.tensor([[kappa[i][j] / (mass[i] * mass[j]) for j in range(n)] for i in range(n)], dtype=torch.float64)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    return centring @ gram @ centring


def slow_attention(heads: Heads, image: int, head: int) -> Tensor:
    """softmax of one head, query by query."""
    q, k = heads.q[image, head], heads.k[image, head]
    rows = []
    for query in q:
        powers = [math.exp(float(query @ key) * heads.scale) for key in k]
        rows.append([p / sum(powers) for p in powers])
    return torch.tensor(rows, dtype=torch.float64)
