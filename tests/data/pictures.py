"""Small pictures for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, number: int, size: tuple[int, int] = (20, 16)) -> None:
    """A smooth picture with hard edges, different for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    Image.fromarray(noise.repeat(4, 0).repeat(4, 1)).save(path)
