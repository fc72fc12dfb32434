"""Variants of attention: one file each, pure tensor algebra."""

from vitruvius.attention._core import (
    Approach,
    Core,
    Kernel,
    Part,
    PartSpec,
    Stage,
    attentions,
    build_core,
    build_twin,
    part,
)
from vitruvius.attention._fitting import fit_low_rank
from vitruvius.attention.interpolation import interpolate, interpolate_state

__all__ = [
    "Approach",
    "Core",
    "Kernel",
    "Part",
    "PartSpec",
    "Stage",
    "attentions",
    "build_core",
    "build_twin",
    "fit_low_rank",
    "interpolate",
    "interpolate_state",
    "part",
]
