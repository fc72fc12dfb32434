"""Checkpoints and masks of GATECH-EIC/ViTCoD (You et al. 2023, arXiv:2210.09573): DeiT and LeViT.

Its masks are .npy files with True = pruned; ours travel in the checkpoint, True = kept.
L layers, H heads, N queries, M keys
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitruvius._errors import CheckpointError
from vitruvius._files import StrPath, read_mask_arrays
from vitruvius.converters._checkpoint import Checkpoint
from vitruvius.converters._converted import IMAGENET, MASKS, Converted, converters, finish
from vitruvius.converters._levit import is_levit, levit_sizes, rename_levit
from vitruvius.converters._upstream import known_name
from vitruvius.converters._vit import merged, sites, vit_sizes

AUTO_ENCODER = re.compile(r"(.*)\.(encoder|decoder)_([qk])\.(weight|bias)")
LEVITS = {f"LeViT_{size}": f"levit_{size.lower()}" for size in ("128S", "128", "192", "256", "384")}


@converters.register("vitcod")
def vitcod(checkpoint: Checkpoint, *, model_name: str | None = None, mask: str | None = None) -> Converted:
    """ViTCoD: head-mixing auto-encoders (encoder_q …), and its masks: a .npy file, for LeViT a folder of them.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, by default told by its shapes;
    `mask` is the path of its masks (default: none).
    """
    checkpoint.drop("attention_sum", "num_attention", why="sums of attention maps, made by --need_weight")
    levit = is_levit(checkpoint)
    if levit:
        rename_levit(checkpoint)
    name = known_name(checkpoint, model_name, LEVITS)
    ranks = _rename_auto_encoders(checkpoint)
    keeps: dict[str, Tensor] = {}
    if levit:
        sizes = levit_sizes(checkpoint)
        names = _levit_sites(sizes["depth"])
        if mask is not None:
            keeps = _levit_masks(Path(mask), sizes["depth"])
    else:
        sizes = vit_sizes(checkpoint, _deit_heads(checkpoint, ranks))
        names = sites(sizes["depth"])
        if mask is not None:
            keeps = _deit_masks(Path(mask), sizes["depth"])
    for site, keep in keeps.items():
        checkpoint.state[f"{site}.core.mask.keep"] = keep
    return finish(checkpoint, {"name": name, **IMAGENET, **sizes}, merged(_rules(ranks, keeps), names))


def _deit_heads(checkpoint: Checkpoint, ranks: dict[str, tuple[str, int, int]]) -> int:
    """As many as the auto-encoders mix; without them as DeiT has, 64 channels each."""
    for _, _, heads in ranks.values():
        return heads
    return checkpoint.shape_of("cls_token")[-1] // 64


def _rename_auto_encoders(checkpoint: Checkpoint) -> dict[str, tuple[str, int, int]]:
    """Move `encoder_q.weight` to `core.low_rank.q.0.weight` and so on; site → (tensors, rank, heads)."""
    found: dict[str, tuple[str, int, int]] = {}
    for key in [key for key in checkpoint.state if AUTO_ENCODER.fullmatch(key)]:
        site, half, tensor, kind = AUTO_ENCODER.fullmatch(key).groups()  # type: ignore[union-attr]
        value = checkpoint.take(key)
        checkpoint.state[f"{site}.core.low_rank.{tensor}.{int(half == 'decoder')}.{kind}"] = value
        if half == "encoder" and kind == "weight":
            tensors = "".join(sorted(found.get(site, ("",))[0] + tensor, reverse=True))  # q before k
            found[site] = (tensors, *value.shape)
    return found


def _rules(ranks: dict[str, tuple[str, int, int]], keeps: dict[str, Tensor]) -> list[dict[str, Any]]:
    rules = []
    for site in dict.fromkeys([*ranks, *keeps]):
        parts: list[dict[str, Any]] = []
        if site in ranks:
            tensors, rank, _ = ranks[site]
            parts.append({"use": "low_rank", "rank": rank, "tensors": tensors, "reconstruction": "released"})
        if site in keeps:
            parts.append({"use": "mask", "keep": "all"})  # the pattern comes with the weights
        rules.append({"where": site, "parts": parts})
    return rules


def _levit_sites(depths: tuple[int, ...]) -> list[str]:
    return [f"stages.{stage}.blocks.{block}.attn" for stage, depth in enumerate(depths) for block in range(depth)]


def _deit_masks(path: Path, depth: int) -> dict[str, Tensor]:
    return dict(zip(sites(depth), _read(path, depth), strict=True))


def _levit_masks(folder: Path, depths: tuple[int, ...]) -> dict[str, Tensor]:
    keeps: dict[str, Tensor] = {}
    for stage, depth in enumerate(depths):
        for block, keep in enumerate(_read(folder / f"mask_dpt{stage}.npy", depth)):
            keeps[f"stages.{stage}.blocks.{block}.attn"] = keep
        sampling = folder / f"mask_subsample{stage}.npy"
        if stage + 1 < len(depths) and sampling.exists():
            (keeps[f"stages.{stage + 1}.downsample.attn_downsample"],) = _read(sampling, 1)
    return keeps


def _read(path: Path, depth: int) -> Tensor:
    """(L, H, N, M), True = kept."""
    try:
        pruned = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a ViTCoD mask: {error}") from error
    if pruned.ndim != 4 or len(pruned) != depth:
        raise CheckpointError(f"{path} has shape {pruned.shape}; expected ({depth} layers, heads, queries, keys).")
    return ~torch.from_numpy(pruned.astype(bool))


@converters.register(MASKS)
def read_masks(path: StrPath) -> dict[str, Tensor]:
    """ViTCoD's mask arrays (info_0.9.npy, or a LeViT's folder), as masks of ours: True = kept.

    `path` is that file or folder.
    """
    return read_mask_arrays(path)
