"""Tiny copies of the published layouts: a few pictures in the right folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitruvius._imagenet import imagenet_classes

CLASSES = imagenet_classes()


def write_pictures(folder: Path, classes: Iterable[str], *, each: int = 1, size: int = 8, seed: int = 0) -> Path:
    """`<class>/<number>.png`, random pixels."""
    random = np.random.default_rng(seed)
    for one in classes:
        (folder / one).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / one / f"{number:03d}.png")
    return folder


def write_corrupted(root: Path, corruptions: Sequence[str], severities: Sequence[int], classes: Sequence[str]) -> Path:
    """`<corruption>/<severity>/<class>/`; other pixels everywhere, the same file names."""
    for place, one in enumerate(corruptions):
        for severity in severities:
            write_pictures(root / one / str(severity), classes, seed=10 * place + severity)
    return root


def write_arrays(root: Path, corruptions: Sequence[str], *, images: int = 6, classes: int = 10, size: int = 8) -> Path:
    """`<corruption>.npy` with five severities, and labels.npy."""
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for one in corruptions:
        np.save(root / f"{one}.npy", random.integers(0, 256, (5 * images, size, size, 3), dtype=np.uint8))
    np.save(root / "labels.npy", np.tile(np.arange(images) % classes, 5))
    return root
