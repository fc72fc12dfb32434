"""Who disturbs, on average: the 15 + 4 corruptions of ImageNet-C, for images of any size, (model, x, y) → x'."""

from vitruvius._registry import load_room
from vitruvius.corruptions._base import SEVERITIES, Corruption, Scale, corruptions
from vitruvius.corruptions._specs import (
    ALL,
    BENCHMARK,
    EXTRA,
    GROUPS,
    corruption_grid,
    is_corruption,
    parse_corruptions,
)

__all__ = [
    "ALL",
    "BENCHMARK",
    "EXTRA",
    "GROUPS",
    "SEVERITIES",
    "Corruption",
    "Scale",
    "corruption_grid",
    "corruptions",
    "is_corruption",
    "parse_corruptions",
]

load_room(__name__, __path__)
