"""Arrays as small PNG pictures inside an address; the page colours grey ones itself, for light and for dark."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from vitruvius.report._csv import data_link


def grey_png(values: np.ndarray) -> str:
    """(rows, columns) in [0, 1] → an 8-bit grey PNG."""
    return _png(Image.fromarray((values * 255).round().clip(0, 255).astype(np.uint8)))


def colour_png(image: np.ndarray) -> str:
    """(3, rows, columns) uint8 → a PNG."""
    return _png(Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))))


def _png(image: Image.Image) -> str:
    with io.BytesIO() as buffer:
        image.save(buffer, "png", optimize=True)
        return data_link("image/png", buffer.getvalue())
