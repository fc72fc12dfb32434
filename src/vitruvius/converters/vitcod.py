"""Checkpoints and masks of GATECH-EIC/ViTCoD (You et al. 2023, arXiv:2210.09573): DeiT and LeViT.

Its masks are .npy files with True = pruned; ours travel in the checkpoint, True = kept.
L layers, H heads, N queries, M keys
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from vitruvius._errors import CheckpointError
from vitruvius._files import StrPath, read_mask_arrays
from vitruvius.converters.base import IMAGENET, MASKS, Checkpoint, Converted, converters, finish
from vitruvius.converters.deit import LEVITS, levit_sizes, rename_levit
from vitruvius.converters.plain import known_name, sites, vit_sizes

AUTO_ENCODER = re.compile(r"(.*)\.(encoder|decoder)_([qk])\.(weight|bias)")


@converters.register("vitcod")
def vitcod(checkpoint: Checkpoint, *, model_name: str | None = None, mask: str | None = None) -> Converted:
    """ViTCoD: head-mixing auto-encoders (encoder_q …), and its masks: a .npy file, for LeViT a folder of them.

    `checkpoint` is the file as it was read; `model_name` is that of the timm model, by default told by its shapes;
    `mask` is the path of its masks (default: none).
    """
    checkpoint.drop("attention_sum", "num_attention", why="sums of attention maps, made by --need_weight")
    levit = rename_levit(checkpoint)
    name = known_name(checkpoint, model_name, LEVITS)
    ranks = _rename_auto_encoders(checkpoint)
    if levit:
        sizes = levit_sizes(checkpoint)
        depths = enumerate(sizes["depth"])
        names = [f"stages.{stage}.blocks.{block}.attn" for stage, depth in depths for block in range(depth)]
    else:  # as many heads as the auto-encoders mix; without them as DeiT has, 64 channels each
        mixed = next((heads for _, _, heads in ranks.values()), None)
        sizes = vit_sizes(checkpoint, mixed or checkpoint.shape_of("cls_token")[-1] // 64)
        names = sites(checkpoint)
    keeps = _masks(mask, names)
    for site, keep in keeps.items():
        checkpoint.state[f"{site}.core.mask.keep"] = keep
    return finish(checkpoint, {"name": name, **IMAGENET, **sizes}, _merged(_rules(ranks, keeps), names))


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


def _merged(rules: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
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


def _masks(path: str | None, names: list[str]) -> dict[str, Tensor]:
    """Site → (H, N, M), True = kept; of every attention of the model, in a LeViT also those that sample down."""
    if path is None:
        return {}
    keeps = read_mask_arrays(path)
    missing = [name for name in names if name not in keeps]
    strange = [name for name in keeps if name not in names and "downsample" not in name]
    if missing or strange:
        raise CheckpointError(f"{path} does not fit the {len(names)} attentions: look at {(missing + strange)[0]}.")
    return keeps


@converters.register(MASKS)
def read_masks(path: StrPath) -> dict[str, Tensor]:
    """ViTCoD's mask arrays (info_0.9.npy, or a LeViT's folder), as masks of ours: True = kept.

    `path` is that file or folder.
    """
    return read_mask_arrays(path)
