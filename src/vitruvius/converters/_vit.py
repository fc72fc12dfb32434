"""Sizes of a ViT, read off the shapes of its weights.       C model width, N patches"""

from __future__ import annotations

import math
import re
from typing import Any

from vitruvius._errors import CheckpointError
from vitruvius.converters.base import Checkpoint


def vit_sizes(checkpoint: Checkpoint, num_heads: int) -> dict[str, Any]:
    """Constructor arguments of timm's VisionTransformer that these weights need."""
    state = checkpoint.state
    for key in ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight"):
        if key not in state:
            raise CheckpointError(f"{checkpoint.name} lacks {key!r}; it is no ViT of this code base.")
    dim, channels, patch, _ = state["patch_embed.proj.weight"].shape
    if dim % num_heads:
        raise CheckpointError(f"{checkpoint.name}: {num_heads} heads do not divide the width {dim}. Set num_heads.")
    sizes: dict[str, Any] = {
        "patch_size": patch,
        "embed_dim": dim,
        "depth": count_blocks(checkpoint),
        "num_heads": num_heads,
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] / dim,
        "in_chans": channels,
        "num_classes": state["head.weight"].shape[0] if "head.weight" in state else 0,
    }
    if "blocks.0.attn.qkv.bias" not in state:
        sizes["qkv_bias"] = False
    if "pos_embed" in state:
        prefix = sum(key in state for key in ("cls_token", "dist_token"))
        sizes["img_size"] = patch * math.isqrt(state["pos_embed"].shape[1] - prefix)
    return sizes


def count_blocks(checkpoint: Checkpoint) -> int:
    """How many numbered blocks the keys name."""
    return len({key.split(".")[1] for key in checkpoint.state if key.startswith("blocks.")})


def merged(rules: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Rules of single sites, joined into a glob where all of `names` that differ in their last number have the same."""
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(_row(name), []).append(name)
    parts = {rule["where"]: rule["parts"] for rule in rules}
    joined: list[dict[str, Any]] = []
    for site, own in parts.items():
        row = rows.get(_row(site), [])
        whole = site in row and all(parts.get(name) == own for name in row)
        rule = {"where": _row(site) if whole else site, "parts": own}
        if rule not in joined:
            joined.append(rule)
    return joined


def _row(name: str) -> str:
    """The name with its last number left open."""
    return re.sub(r"\d+(?!.*\d)", "*", name, count=1)


def sites(depth: int) -> list[str]:
    """Names of the attention sites of a ViT."""
    return [f"blocks.{i}.attn" for i in range(depth)]
