"""ImageNet-R: renditions (art, cartoons, toys …) of 200 classes (Hendrycks et al. 2021, arXiv:2006.16241)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._pictures import natural_shift


@shifts.register("imagenet-r")
def imagenet_r(root: Path) -> Shift:
    """`<wnid>/`, 30,000 pictures; only the logits of its 200 classes count.

    `root` is the folder above the classes.
    """
    return natural_shift(root, name="imagenet-r", archive=("imagenet-r",), subset="r")
