"""Small pictures for tests, and what loaders make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from small_run import all_images
from vitruvius.data.loader import BatchWithIds, Loader


def write_image(path: Path, number: int, size: tuple[int, int] = (20, 16)) -> None:
    """A smooth picture with hard edges, different for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    Image.fromarray(noise.repeat(4, 0).repeat(4, 1)).save(path)


def everything(loader: Loader) -> tuple[torch.Tensor, ...]:
    """Images, labels and ids of all batches together."""
    return all_images(loader.with_ids())


def same(first: list[BatchWithIds], second: list[BatchWithIds]) -> bool:
    """Whether two lists of batches hold the same images, labels and ids, bit for bit."""
    if len(first) != len(second):
        return False
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
