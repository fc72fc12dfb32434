"""ImageNet-A: natural pictures that fool ResNets, 200 classes (Hendrycks et al. 2021, arXiv:1907.07174)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._pictures import natural_shift


@shifts.register("imagenet-a")
def imagenet_a(root: Path) -> Shift:
    """`<wnid>/`, 7,500 pictures; only the logits of its 200 classes count.

    `root` is the folder above the classes.
    """
    return natural_shift(root, name="imagenet-a", archive=("imagenet-a",), subset="a")
