"""Tiny image folders, made on the spot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def write_image(path: Path, number: int, size: tuple[int, int] = (20, 16)) -> None:
    """A smooth picture with hard edges, different for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    Image.fromarray(noise.repeat(4, 0).repeat(4, 1)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train: 3 classes × 5 images, val: 3 classes × 3 images."""
    for split, count in (("train", 5), ("val", 3)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                write_image(tmp_path / split / name / f"{i}.png", 100 * label + i)
    return tmp_path
