"""Average attention maps: the mean over images of softmax(q kᵀ · scale + bias) at every site, streamed in float64.

B batch, H heads, N queries, M keys. Windows of one image count as so many images.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import DataError
from vitruvius._files import save_tensors
from vitruvius.attention.softmax import attention_map
from vitruvius.evaluation import numbered
from vitruvius.heads import Heads
from vitruvius.surgery import inner, record


@torch.no_grad()
def average_maps(model: nn.Module, loader: Iterable[Any], where: str = "*") -> dict[str, Tensor]:
    """The mean map (H, N, M) of every matching site, each image seen once; memory does not grow with the data.

    What is averaged is the map of the heads as they leave the stages of a core. Train or eval mode is the caller's.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def note(name: str, heads: Heads) -> None:
        maps = attention_map(after_stages(model, name, heads)).double()  # (B, H, N, M)
        sums[name] = sums.get(name, 0.0) + maps.sum(0)
        counts[name] = counts.get(name, 0) + len(maps)

    device = next(model.parameters()).device
    with record(model, where, on_heads=note):
        for x, _, _ in numbered(loader):
            model(x.to(device))
    if not sums:
        raise DataError("the loader yielded no images; there is nothing to average.")
    return {name: (sums[name] / counts[name]).float() for name in sums}


def save_maps(path: str | Path, maps: Mapping[str, Tensor], **notes: object) -> None:
    """Maps by site in one safetensors file that says what it holds."""
    metadata = {"kind": "average attention maps, (heads, queries, keys), rows sum to one"}
    save_tensors(path, maps, metadata | {key: json.dumps(value) for key, value in notes.items()})


def after_stages(model: nn.Module, name: str, heads: Heads) -> Heads:
    """What the kernel of a site receives: the heads after the stages of its core."""
    core: Any = getattr(inner(model).get_submodule(name), "core", None)
    for stage in list(core.children())[:-1] if core is not None else []:
        heads = stage(heads)
    return heads
