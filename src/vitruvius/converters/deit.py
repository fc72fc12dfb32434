"""Checkpoints of facebookresearch/deit and its sisters: DeiT, DeiT III, CaiT, XCiT, LeViT, as published."""

from __future__ import annotations

from typing import Any

from vitruvius.converters._checkpoint import Checkpoint
from vitruvius.converters._converted import IMAGENET, Converted, converters, finish
from vitruvius.converters._levit import is_levit, levit_sizes, rename_levit
from vitruvius.converters._upstream import adapt, class_count, known_name
from vitruvius.converters.vitcod import LEVITS

RENAMED = LEVITS | {  # the names of the repository, where timm has another
    "deit_small_patch16_LS": "deit3_small_patch16_224",
    "deit_medium_patch16_LS": "deit3_medium_patch16_224",
    "deit_base_patch16_LS": "deit3_base_patch16_224",
    "deit_large_patch16_LS": "deit3_large_patch16_224",
    "deit_huge_patch14_LS": "deit3_huge_patch14_224",
    "cait_XXS24_224": "cait_xxs24_224",
    "cait_XXS36_224": "cait_xxs36_224",
    "cait_S24_224": "cait_s24_224",
}


@converters.register("deit")
def deit(checkpoint: Checkpoint, *, model_name: str | None = None) -> Converted:
    """facebookresearch/deit: DeiT, distilled DeiT, DeiT III (layer scale), CaiT, and LeViT of its sister repository.

    checkpoint: what was read from the file. model_name: timm's name, where the file does not tell it.
    """
    levit = is_levit(checkpoint)
    if levit:
        rename_levit(checkpoint)
    model: dict[str, Any] = {"name": known_name(checkpoint, model_name, RENAMED), **IMAGENET}
    if levit:
        model |= levit_sizes(checkpoint)
    else:
        model |= class_count(checkpoint)
        if checkpoint.args.get("input_size"):
            model["img_size"] = int(checkpoint.args["input_size"])
    adapt(checkpoint, model)
    return finish(checkpoint, model)
