"""Corruptions, the average case: the 15 + 4 of ImageNet-C, for images of any size, (model, x, y) → x'."""

import warnings
from typing import Any

from vitruvius.corruptions._base import SEVERITIES, Corruption, Scale, corruptions
from vitruvius.corruptions._specs import (
    BENCHMARK,
    EXTRA,
    GROUPS,
    IMAGENET_C,
    corruption_grid,
    corruption_names,
    is_corruption,
    parse_corruptions,
)

__all__ = [
    "BENCHMARK",
    "EXTRA",
    "GROUPS",
    "IMAGENET_C",
    "SEVERITIES",
    "Corruption",
    "Scale",
    "corruption_grid",
    "corruption_names",
    "corruptions",
    "is_corruption",
    "parse_corruptions",
]


def __getattr__(name: str) -> Any:
    """`ALL` was the published set; for one release it still is."""
    if name == "ALL":
        warnings.warn("corruptions.ALL is now corruptions.IMAGENET_C.", DeprecationWarning, stacklevel=2)
        return IMAGENET_C
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
