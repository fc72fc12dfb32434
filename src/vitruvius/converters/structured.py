"""Checkpoints of osiriszjq/structured_init (Zheng et al. 2024, arXiv:2404.01139), a fork of timm 0.9.16.

With `sin_pe` the fork kept its position table outside the checkpoint; it is made again here.
"""

from __future__ import annotations

from typing import Any

from timm.layers import build_sincos2d_pos_embed

from vitruvius._errors import CheckpointError
from vitruvius.converters.base import Checkpoint, Converted, converters, finish
from vitruvius.converters.plain import known_name, stored_statistics, vit_sizes

RENAMED = {
    "vit_tiny_patch2_32": "vitruvius/vit_tiny_patch2_32",
    "vit_tiny_patch2_32_base": "vitruvius/vit_base_patch2_32",
}


@converters.register("structured")
def structured(
    checkpoint: Checkpoint, *, model_name: str | None = None, num_heads: int | None = None, img_size: int | None = None
) -> Converted:
    """structured_init: ViTs of its timm fork, with learned or fixed sin-cos positions.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, `num_heads` of its layers,
    `img_size` the side of its images in pixels; by default told by shapes and stored arguments.
    """
    if "blocks.0.0.fn.0.choice_idx" in checkpoint.state or "stem.0.weight" in checkpoint.state:
        raise CheckpointError(
            f"{checkpoint.name} is a ConvMixer of structured_init. Which filter belongs to which channel was drawn at "
            "random and never saved, so these weights cannot be used again, by anybody."
        )
    name = known_name(checkpoint, model_name, RENAMED)
    kwargs = checkpoint.args.get("model_kwargs") or {}
    one_per_64_channels = max(checkpoint.shape_of("patch_embed.proj.weight")[0] // 64, 1)
    sizes = vit_sizes(checkpoint, int(num_heads or kwargs.get("num_heads") or one_per_64_channels))
    if "cls_token" not in checkpoint.state:
        sizes |= {"class_token": False, "global_pool": "avg"}
    elif kwargs.get("no_embed_class"):
        sizes["no_embed_class"] = True
    if "pos_embed" not in checkpoint.state:
        sizes["img_size"] = img_size or _image_size(checkpoint, name)
        _add_positions(checkpoint, sizes)
    return finish(checkpoint, {"name": name, **_statistics(checkpoint), **sizes})


def _add_positions(checkpoint: Checkpoint, sizes: dict[str, Any]) -> None:
    side = sizes["img_size"] // sizes["patch_size"]
    table = build_sincos2d_pos_embed([side, side], dim=sizes["embed_dim"])  # (N, C)
    if sizes.get("class_token", True):
        sizes["no_embed_class"] = True
    checkpoint.state["pos_embed"] = table[None].to(checkpoint.state["patch_embed.proj.weight"].dtype)
    checkpoint.notes.append(
        "pos_embed is the fixed 2-D sin-cos table, which the fork did not save; it was not trained."
    )


def _image_size(checkpoint: Checkpoint, name: str) -> int:
    stored = checkpoint.args.get("img_size") or (checkpoint.args.get("input_size") or [None])[-1]
    size = stored or {"32": 32, "224": 224}.get(name.rpartition("_")[2])
    if size is None:
        raise CheckpointError(f"{checkpoint.name} does not say for which image size it is. Set img_size.")
    return int(size)


def _statistics(checkpoint: Checkpoint) -> dict[str, Any]:
    found = stored_statistics(checkpoint)
    if len(found) < 2:
        checkpoint.notes.append("the checkpoint does not record mean and std; timm's for this model are taken.")
        return {}
    return found
