"""Tiny image folders, made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import write_image

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train: 3 classes × 5 images, val: 3 classes × 3 images."""
    for split, count in (("train", 5), ("val", 3)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                write_image(tmp_path / split / name / f"{i}.png", 100 * label + i)
    return tmp_path
