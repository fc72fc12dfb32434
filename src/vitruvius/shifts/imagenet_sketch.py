"""ImageNet-Sketch: drawings of all 1,000 classes (Wang et al. 2019, arXiv:1905.13549)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._pictures import natural_shift


@shifts.register("imagenet-sketch")
def imagenet_sketch(root: Path) -> Shift:
    """`sketch/<wnid>/` or `<wnid>/`, 50,889 drawings.

    `root` is the folder above the classes, or above `sketch`.
    """
    return natural_shift(root, name="imagenet-sketch", archive=("sketch", "imagenet-sketch", "images"))
