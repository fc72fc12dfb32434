"""ViTCoD's .npy arrays by our site names: one for all layers of a ViT, or for a LeViT a folder with one per stage.

You et al. 2023, "ViTCoD": maps and masks (L, H, N, M), L layers, H heads, N queries, M keys; in masks True = removed.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitruvius._errors import CheckpointError


def is_array(path: str | Path) -> bool:
    """Whether a path names such arrays: a .npy file, or a folder of them."""
    return Path(path).suffix == ".npy" or (Path(path).suffix == "" and not Path(path).is_file())


def read_arrays(path: str | Path, stem: str) -> dict[str, Tensor]:
    """ViTCoD's array of all layers, or its folder of one array a stage, by our site names."""
    path = Path(path)
    if not path.is_dir():
        return {f"blocks.{i}.attn": layer for i, layer in enumerate(_read(path))}
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob(f"{stem}_*.npy")):
        kind, stage = re.fullmatch(rf"{stem}_(dpt|subsample)(\d+)", file.stem).groups()  # type: ignore[union-attr]
        for block, layer in enumerate(_read(file)):
            name = f"stages.{stage}.blocks.{block}.attn"
            found[name if kind == "dpt" else f"stages.{int(stage) + 1}.downsample.attn_downsample"] = layer
    if not found:
        raise CheckpointError(f"{path} holds no {stem}_dpt*.npy; expected ViTCoD's arrays of the stages of a LeViT.")
    return found


def read_mask_arrays(path: str | Path) -> dict[str, Tensor]:
    """The same for masks, turned over: True = kept."""
    keep: dict[str, Tensor] = {}
    for name, removed in read_arrays(path, "mask").items():
        if not ((removed == 0) | (removed == 1)).all():
            raise CheckpointError(
                f"{path} holds other numbers than 0 and 1 at {name!r}: average maps? `vitruvius masks {path}` makes "
                "masks of them."
            )
        keep[name] = removed == 0
    return keep


def _read(path: Path) -> Tensor:
    """(L, H, N, M)."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is not one of ViTCoD's arrays: {error}") from error
    if array.ndim != 4:
        raise CheckpointError(f"{path} has shape {array.shape}; expected (layers, heads, queries, keys).")
    return torch.from_numpy(np.ascontiguousarray(array))
