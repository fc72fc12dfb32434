"""The golden files of ViTCoD as these tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden"


def golden(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    path = FOLDER / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def cases(metadata: dict[str, str]) -> list[dict[str, Any]]:
    return list(json.loads(metadata["cases"]))


def unpacked(bits: Tensor, metadata: dict[str, str]) -> Tensor:
    """A bool array that was stored eight to a byte."""
    shape = json.loads(metadata["shape"])
    return torch.from_numpy(np.unpackbits(bits.numpy())[: np.prod(shape)].astype(bool).reshape(shape))


def deit_tiny_keep() -> Tensor:
    """The one mask published with ViTCoD, (12, 3, 197, 197), True = kept."""
    tensors, metadata = golden("vitcod_deit_tiny_mask")
    return ~unpacked(tensors["removed_bits"], metadata)
