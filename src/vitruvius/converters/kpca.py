"""Checkpoints of rachtsy/KPCA_code (Teo & Nguyen 2024, arXiv:2406.13762): RPC and symmetric, scaled, reconstruction.

And of KarahanS/Reproduction-Study-KPCA (arXiv:2505.07908): ViTs that standardise q and k.      C model width
KPCA's RPC and symmetric layers project to k and v only (2C rows); ours keep timm's 3C rows. The idle q rows are filled
with those of k, so that the same weights in plain timm compute symmetric attention.
"""

from __future__ import annotations

from typing import Any

import torch

from vitruvius._errors import CheckpointError
from vitruvius.converters.base import IMAGENET, Checkpoint, Converted, converters, finish
from vitruvius.converters.plain import sites, vit_sizes

HEADS = {"deit_tiny_patch16_224": 3, "deit_small_patch16_224": 6, "deit_base_patch16_224": 12}
RECONSTRUCTION_HEADS = {"deit_tiny_patch16_224": 6, "vit_tiny_patch16_224": 3}


@converters.register("kpca")
def kpca(
    checkpoint: Checkpoint,
    *,
    model_name: str | None = None,
    num_heads: int | None = None,
    robust: bool | None = None,
    iterations: int | None = None,
    sparsity: float | None = None,
    layer: int | None = None,
) -> Converted:
    """KPCA_code: symmetric and RPC layers (2C-row qkv), scaled attention (`s`), z-scored reconstruction layers.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, `num_heads` of its layers; `robust`
    says whether keys are cleaned, in how many `iterations` with lambda `sparsity`, in which `layer`; by default what
    the arguments stored in the checkpoint say.
    """
    if "blocks.0.attn.s" in checkpoint.state:
        return _scaled(checkpoint, model_name, num_heads)
    rows, dim = checkpoint.shape_of("blocks.0.attn.qkv.weight")
    if rows == 3 * dim:
        return reproduction(checkpoint, model_name=model_name, num_heads=num_heads)
    if rows != 2 * dim:
        raise CheckpointError(
            f"{checkpoint.name}: qkv has {rows} rows for width {dim}; KPCA_code has 2 or 3 times as many."
        )
    _fill_queries(checkpoint)
    model = _model(checkpoint, model_name, num_heads, HEADS)
    given = {"robust": robust, "num_iter": iterations, "lambd": sparsity, "layer": layer}
    settings = checkpoint.args | {key: value for key, value in given.items() if value is not None}
    return finish(checkpoint, model, _pursuit_rules(checkpoint, settings))


@converters.register("reproduction")
def reproduction(checkpoint: Checkpoint, *, model_name: str | None = None, num_heads: int | None = None) -> Converted:
    """Reproduction-Study-KPCA: standardised q and k; its deit_tiny has 6 heads, its vit_tiny 3.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model and `num_heads` of its layers, by
    default told by shapes and stored arguments.
    """
    model = _model(checkpoint, model_name, num_heads, RECONSTRUCTION_HEADS)
    return finish(checkpoint, model, [{"where": "blocks.*.attn", "parts": [{"use": "standardised"}]}])


def _scaled(checkpoint: Checkpoint, model_name: str | None, num_heads: int | None) -> Converted:
    shape = checkpoint.state["blocks.0.attn.s"].shape
    form, heads = ("matrix", shape[0]) if len(shape) == 3 else ("alpha", num_heads)
    for site in sites(checkpoint):
        checkpoint.state[f"{site}.core.scaled.{form}"] = checkpoint.take(f"{site}.s")
    model = _model(checkpoint, model_name, heads, HEADS)
    return finish(checkpoint, model, [{"where": "blocks.*.attn", "parts": [{"use": "scaled", "form": form}]}])


def _model(checkpoint: Checkpoint, name: str | None, num_heads: int | None, heads: dict[str, int]) -> dict[str, Any]:
    name = name or checkpoint.args.get("model")
    if num_heads is None and name not in heads:
        raise CheckpointError(
            f"{checkpoint.name} does not say how many heads its model {name!r} has. Set model_name (one of "
            f"{', '.join(heads)}) or num_heads."
        )
    sizes = vit_sizes(checkpoint, num_heads or heads[str(name)])
    return {"name": name if name in heads else "deit_tiny_patch16_224", **IMAGENET, **sizes}


def _fill_queries(checkpoint: Checkpoint) -> None:
    for site in sites(checkpoint):
        for kind in ("weight", "bias"):
            if f"{site}.qkv.{kind}" in checkpoint.state:
                keys, values = checkpoint.state[f"{site}.qkv.{kind}"].chunk(2)
                checkpoint.state[f"{site}.qkv.{kind}"] = torch.cat([keys, keys, values])
    checkpoint.notes.append("qkv had rows for k and v only; the idle q rows are copies of the k rows.")


def _pursuit_rules(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if "robust" not in settings:
        checkpoint.notes.append("no stored arguments say whether RPC was on; read as symmetric. Set robust=true.")
    if not settings.get("robust"):
        return [{"where": "blocks.*.attn", "parts": [{"use": "symmetric"}]}]
    pursuit = {
        "use": "rpc",
        "iterations": max(int(settings.get("num_iter", 1)), 1),
        "sparsity": float(settings.get("lambd", 0.0)),
        "variant": "released",
    }
    layer = int(settings.get("layer", 0))
    if layer < 0:
        return [{"where": "blocks.*.attn", "parts": [pursuit]}]
    names = sites(checkpoint)
    if layer >= len(names):
        checkpoint.notes.append(f"layer {layer} does not exist in a model of {len(names)} blocks, so RPC was nowhere.")
    return [
        {"where": name, "parts": [pursuit if place == layer else {"use": "symmetric"}]}
        for place, name in enumerate(names)
    ]
