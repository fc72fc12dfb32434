"""Bare layers to start, without a model around them; golden files; small timm models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vitruvius.heads import HeadWeights, Site
from vitruvius.init import Layer


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sincos(rows: int, columns: int, dim: int) -> Tensor:
    """The table, written out entry by entry in double precision."""
    quarter = dim // 4
    omega = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    y, x = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double().unbind(-1)
    y, x = y[:, None] * omega, x[:, None] * omega
    return torch.cat([y.sin(), x.sin(), y.cos(), x.cos()], dim=1)


def make_layers(
    positions: Tensor | None, grid: tuple[int, int] | None, *, num_heads: int = 3, dim: int = 192, depth: int = 2,
    head_dim: int | None = None, **site: Any,
) -> list[Layer]:  # fmt: skip
    """Layers as `initialise` would make them, weights full of sevens."""
    width = head_dim or dim // num_heads
    dtype = torch.float32 if positions is None else positions.dtype
    tokens = 1 if grid is None else grid[0] * grid[1]
    made = []
    for i in range(depth):
        q, k, v = torch.full((3, num_heads, width, dim), 7.0, dtype=dtype)
        biases = torch.full((3, num_heads, width), 7.0, dtype=dtype)
        sizes = {"num_heads": num_heads, "num_queries": tokens, "num_keys": tokens, "key_dim": width}
        sizes |= {"value_dim": width, "dim": dim, "grid": grid, "family": "vit", "attends": "tokens"} | site
        weights = HeadWeights(q, k, v, torch.full((dim, num_heads, width), 7.0, dtype=dtype), *biases)
        made.append(Layer(weights=weights, site=Site(name=f"blocks.{i}.attn", **sizes), positions=positions))
    return made


def attention_of(layer: Layer, x: Tensor) -> Tensor:
    """softmax(x qᵀ k xᵀ / √D) for normalised inputs x: (H, N, N)."""
    q, k = (F.layer_norm(x, x.shape[-1:]) @ w.mT for w in (layer.weights.q, layer.weights.k))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def small_vit(**kwargs: Any) -> VisionTransformer:
    """Six by six patches, width 48, three heads, two blocks."""
    sizes = {"img_size": 12, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    return VisionTransformer(**{**sizes, **kwargs}).eval()
