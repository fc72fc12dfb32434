"""Checkpoints of timm's own train.py, bare state dicts of timm models, and what every layout reads off its weights."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any

import timm
import torch
from timm.models import is_model

from vitruvius._errors import CheckpointError
from vitruvius.converters.base import Checkpoint, Converted, converters, finish
from vitruvius.models import create_model, models
from vitruvius.surgery.base import inner

HEADS = ("head.weight", "head.fc.weight", "head.linear.weight", "fc.weight", "classifier.weight")


@converters.register("timm")
def plain(checkpoint: Checkpoint, *, model_name: str | None = None) -> Converted:
    """timm: its training checkpoints (state_dict, state_dict_ema, arch, args) and plain weights.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, by default the one it names itself.
    """
    model: dict[str, Any] = {"name": known_name(checkpoint, model_name), **class_count(checkpoint)}
    model |= dict(checkpoint.args.get("model_kwargs") or {})
    model |= stored_statistics(checkpoint)
    if checkpoint.args.get("img_size"):
        model["img_size"] = int(checkpoint.args["img_size"])
    adapt(checkpoint, model)
    return finish(checkpoint, model)


def known_name(checkpoint: Checkpoint, model_name: str | None, renamed: dict[str, str] | None = None) -> str:
    """The model a checkpoint belongs to, under its present name."""
    name = model_name or checkpoint.args.get("model") or checkpoint.args.get("arch")
    if name is None:
        raise CheckpointError(f"{checkpoint.name} does not say which model it is. Set model_name.")
    present = (renamed or {}).get(str(name), str(name))
    if present not in models and not is_model(present.split(".")[0]):
        raise CheckpointError(f"{checkpoint.name} is a {name!r}, which neither timm {timm.__version__} nor we have.")
    return present


def stored_statistics(checkpoint: Checkpoint) -> dict[str, tuple[float, ...]]:
    """mean and std, as far as the settings of the run say them."""
    return {key: tuple(checkpoint.args[key]) for key in ("mean", "std") if checkpoint.args.get(key)}


def class_count(checkpoint: Checkpoint) -> dict[str, int]:
    """num_classes, where the head says it."""
    head = next((key for key in HEADS if key in checkpoint.state), None)
    return {} if head is None else {"num_classes": checkpoint.state[head].shape[0]}


def adapt(checkpoint: Checkpoint, model: dict[str, Any]) -> None:
    """Bring the keys into the order of the timm model that `model` describes, by timm's own filter; in place."""
    with torch.device("meta"):  # shapes are enough to compare
        target = inner(create_model(**model))
    change = getattr(importlib.import_module(type(target).__module__), "checkpoint_filter_fn", None)
    if change is None or checkpoint.state.keys() == target.state_dict().keys():
        return
    if "adapt_layer_scale" in inspect.signature(change).parameters:
        change = functools.partial(change, adapt_layer_scale=True)
    before = checkpoint.state
    checkpoint.state = dict(change(dict(before), target))
    kept = {tensor.untyped_storage().data_ptr() for tensor in checkpoint.state.values()}
    lost = [key for key, tensor in before.items() if tensor.untyped_storage().data_ptr() not in kept]
    if lost:
        checkpoint.notes.append(f"left behind by timm's own filter: {', '.join(lost)}.")


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
        "depth": len(sites(checkpoint)),
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


def sites(checkpoint: Checkpoint) -> list[str]:
    """Names of the attention sites of a ViT, one in each numbered block that its keys name."""
    blocks = {key.split(".")[1] for key in checkpoint.state if key.startswith("blocks.")}
    return [f"blocks.{i}.attn" for i in range(len(blocks))]
