"""ImageNet-C: 15 corruptions and 4 extra ones at 5 severities (Hendrycks & Dietterich 2019, arXiv:1903.12261)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C
from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._corrupted import corrupted_imagenet


@shifts.register("imagenet-c")
def imagenet_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<wnid>/`, also inside noise, blur, weather, digital and extra.

    `root` is the folder above the corruptions, or above those five.
    """
    return corrupted_imagenet(root, "imagenet-c", IMAGENET_C, archive=("imagenet-c", "ImageNet-C"), benchmark=BENCHMARK)
