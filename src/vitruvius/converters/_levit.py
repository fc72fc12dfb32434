"""LeViT as facebookresearch wrote it → timm's: one numbered list of blocks becomes stages.

There, attention, MLP, attention, MLP, … follow each other, with a sub-sampling attention between stages; timm puts the
latter at the head of the next stage.       H heads, D key width, C model width
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from vitruvius._errors import CheckpointError
from vitruvius.converters._checkpoint import Checkpoint

INNER = (  # a module's own names, theirs and timm's
    (r"\b(qkv|kv)\.c\b", r"\1.linear"),
    (r"\b(q|proj)\.1\.c\b", r"\1.ln.linear"),
    (r"\b(q|proj)\.1\.bn\b", r"\1.ln.bn"),
    (r"\bmlp\.0\.c\b", "mlp.ln1.linear"),
    (r"\bmlp\.0\.bn\b", "mlp.ln1.bn"),
    (r"\bmlp\.2\.c\b", "mlp.ln2.linear"),
    (r"\bmlp\.2\.bn\b", "mlp.ln2.bn"),
    (r"^(head|head_dist)\.l\b", r"\1.linear"),
)


def is_levit(checkpoint: Checkpoint) -> bool:
    return "blocks.0.m.qkv.c.weight" in checkpoint.state


def rename_levit(checkpoint: Checkpoint) -> None:
    """Bring the keys into timm's order; in place."""
    checkpoint.drop("attention_bias_idxs", why="an index table that timm makes itself")
    places = dict(_places(checkpoint))
    checkpoint.state = {_renamed(key, places): value for key, value in checkpoint.state.items()}


def levit_sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Constructor arguments of timm's Levit, read off the shapes of renamed weights."""
    state = checkpoint.state
    stages = _stages(checkpoint)
    first = [f"stages.{stage}.blocks.0.attn." for stage in stages]
    heads = [state[f"{site}attention_biases"].shape[0] for site in first]
    rows = state[f"{first[0]}qkv.linear.weight"].shape[0]
    return {
        "img_size": 16 * math.isqrt(state[f"{first[0]}attention_biases"].shape[1]),
        "embed_dim": tuple(state[f"{site}qkv.linear.weight"].shape[1] for site in first),
        "key_dim": rows // (4 * heads[0]),  # q, k and values twice as wide
        "num_heads": tuple(heads),
        "depth": tuple(_depth(state, stage) for stage in stages),
        "num_classes": state["head.linear.weight"].shape[0],
    }


def _stages(checkpoint: Checkpoint) -> list[int]:
    """Numbers of the stages, none missing."""
    stages = sorted({int(key.split(".")[1]) for key in checkpoint.state if key.startswith("stages.")})
    if stages != list(range(len(stages))) or not stages:
        raise CheckpointError(f"{checkpoint.name} is not a whole LeViT.")
    return stages


def _places(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Their block → timm's module, walking through the list."""
    state = checkpoint.state
    stage, block = 0, -1
    after_sampling = False
    for i in sorted({int(key.split(".")[1]) for key in state if key.startswith("blocks.")}):
        if f"blocks.{i}.kv.c.weight" in state:
            stage, block, after_sampling = stage + 1, -1, True
            yield f"blocks.{i}", f"stages.{stage}.downsample.attn_downsample"
        elif f"blocks.{i}.m.qkv.c.weight" in state:
            block, after_sampling = block + 1, False
            yield f"blocks.{i}.m", f"stages.{stage}.blocks.{block}.attn"
        else:
            place = f"blocks.{block}"
            if after_sampling:
                place = "downsample"
            yield f"blocks.{i}.m", f"stages.{stage}.{place}.mlp"


def _renamed(key: str, places: dict[str, str]) -> str:
    stem = re.match(r"patch_embed\.(\d+)\.(c|bn)\.(.*)", key)
    if stem:
        layer = {"c": "linear", "bn": "bn"}[stem[2]]
        return f"stem.conv{int(stem[1]) // 2 + 1}.{layer}.{stem[3]}"
    for theirs, ours in places.items():
        if key.startswith(f"{theirs}."):
            key = ours + key.removeprefix(theirs)
            break
    for pattern, replacement in INNER:
        key = re.sub(pattern, replacement, key)
    return key


def _depth(state: dict[str, Any], stage: int) -> int:
    return len({key.split(".")[3] for key in state if key.startswith(f"stages.{stage}.blocks.")})
