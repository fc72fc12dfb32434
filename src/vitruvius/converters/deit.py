"""Checkpoints of facebookresearch/deit and its sisters: DeiT, DeiT III, CaiT, XCiT, LeViT, as published.

LeViT was written as one numbered list: attention, MLP, attention, MLP, …, with a sub-sampling attention between stages;
timm puts the latter at the head of the next stage.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vitruvius._errors import CheckpointError
from vitruvius.converters.base import IMAGENET, Checkpoint, Converted, converters, finish
from vitruvius.converters.plain import adapt, class_count, known_name

LEVITS = {f"LeViT_{size}": f"levit_{size.lower()}" for size in ("128S", "128", "192", "256", "384")}
DEIT3 = ("small_patch16", "medium_patch16", "base_patch16", "large_patch16", "huge_patch14")
RENAMED = LEVITS | {f"deit_{size}_LS": f"deit3_{size}_224" for size in DEIT3}  # where timm has another name
RENAMED |= {f"cait_{size}_224": f"cait_{size.lower()}_224" for size in ("XXS24", "XXS36", "S24")}
INNER = (  # names inside LeViT's modules, theirs and timm's
    (r"^patch_embed\.(\d+)\.", lambda match: f"stem.conv{int(match[1]) // 2 + 1}."),
    (r"^(stem\.conv\d)\.c\b", r"\1.linear"),
    (r"\b(qkv|kv)\.c\b", r"\1.linear"),
    (r"\b(q|proj)\.1\.c\b", r"\1.ln.linear"),
    (r"\b(q|proj)\.1\.bn\b", r"\1.ln.bn"),
    (r"\bmlp\.([02])\.c\b", lambda match: f"mlp.ln{int(match[1]) // 2 + 1}.linear"),
    (r"\bmlp\.([02])\.bn\b", lambda match: f"mlp.ln{int(match[1]) // 2 + 1}.bn"),
    (r"^(head|head_dist)\.l\b", r"\1.linear"),
)


@converters.register("deit")
def deit(checkpoint: Checkpoint, *, model_name: str | None = None) -> Converted:
    """facebookresearch/deit: DeiT, distilled DeiT, DeiT III (layer scale), CaiT, and LeViT of its sister repository.

    checkpoint: what was read from the file. model_name: timm's name, where the file does not tell it.
    """
    levit = rename_levit(checkpoint)
    model: dict[str, Any] = {"name": known_name(checkpoint, model_name, RENAMED), **IMAGENET}
    if levit:
        model |= levit_sizes(checkpoint)
    else:
        model |= class_count(checkpoint)
        if checkpoint.args.get("input_size"):
            model["img_size"] = int(checkpoint.args["input_size"])
    adapt(checkpoint, model)
    return finish(checkpoint, model)


def rename_levit(checkpoint: Checkpoint) -> bool:
    """Bring LeViT's keys into timm's order, in place; whether it is a LeViT."""
    state = checkpoint.state
    if "blocks.0.m.qkv.c.weight" not in state:
        return False
    checkpoint.drop("attention_bias_idxs", why="an index table that timm makes itself")
    places: dict[str, str] = {}  # their block: timm's module
    stage, block, mlp = 0, -1, ""
    for i in sorted({int(key.split(".")[1]) for key in state if key.startswith("blocks.")}):
        if f"blocks.{i}.kv.c.weight" in state:
            stage, block, mlp = stage + 1, -1, "downsample"
            places[f"blocks.{i}"] = f"stages.{stage}.downsample.attn_downsample"
        elif f"blocks.{i}.m.qkv.c.weight" in state:
            block += 1
            mlp = f"blocks.{block}"
            places[f"blocks.{i}.m"] = f"stages.{stage}.{mlp}.attn"
        else:
            places[f"blocks.{i}.m"] = f"stages.{stage}.{mlp}.mlp"
    renamed = {}
    for key, value in state.items():
        theirs = next((place for place in places if key.startswith(f"{place}.")), "")
        name = places.get(theirs, "") + key.removeprefix(theirs)
        for pattern, replacement in INNER:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    checkpoint.state = renamed
    return True


def levit_sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Constructor arguments of timm's Levit, read off the shapes of renamed weights."""
    state = checkpoint.state
    blocks = {tuple(key.split(".")[1:4]) for key in state if re.match(r"stages\.\d+\.blocks\.", key)}
    stages = sorted({int(stage) for stage, *_ in blocks})
    if stages != list(range(len(stages))) or not stages:
        raise CheckpointError(f"{checkpoint.name} is not a whole LeViT.")
    first = [f"stages.{stage}.blocks.0.attn." for stage in stages]
    heads = [state[f"{site}attention_biases"].shape[0] for site in first]
    rows = state[f"{first[0]}qkv.linear.weight"].shape[0]
    return {
        "img_size": 16 * math.isqrt(state[f"{first[0]}attention_biases"].shape[1]),
        "embed_dim": tuple(state[f"{site}qkv.linear.weight"].shape[1] for site in first),
        "key_dim": rows // (4 * heads[0]),  # q, k and values twice as wide
        "num_heads": tuple(heads),
        "depth": tuple(sum(int(block[0]) == stage for block in blocks) for stage in stages),
        "num_classes": state["head.linear.weight"].shape[0],
    }
