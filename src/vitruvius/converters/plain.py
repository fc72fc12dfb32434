"""Checkpoints of timm's own train.py, and bare state dicts of timm models."""

from __future__ import annotations

from typing import Any

from vitruvius.converters._checkpoint import Checkpoint
from vitruvius.converters._converted import Converted, converters, finish
from vitruvius.converters._upstream import adapt, class_count, known_name


@converters.register("timm")
def plain(checkpoint: Checkpoint, *, model_name: str | None = None) -> Converted:
    """timm: its training checkpoints (state_dict, state_dict_ema, arch, args) and plain weights.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, by default the one it names itself.
    """
    model: dict[str, Any] = {"name": known_name(checkpoint, model_name), **class_count(checkpoint)}
    model |= dict(checkpoint.args.get("model_kwargs") or {})
    model |= {key: tuple(checkpoint.args[key]) for key in ("mean", "std") if checkpoint.args.get(key)}
    if checkpoint.args.get("img_size"):
        model["img_size"] = int(checkpoint.args["img_size"])
    adapt(checkpoint, model)
    return finish(checkpoint, model)
