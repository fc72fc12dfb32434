"""ImageNet-C: 15 corruptions and 4 extra ones at 5 severities (Hendrycks & Dietterich 2019, arXiv:1903.12261)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.corruptions import ALL, BENCHMARK
from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._classes import NUM_CLASSES, imagenet_labels
from vitruvius.shifts._corrupted import PUBLISHED, below, corrupted_parts


@shifts.register("imagenet-c")
def imagenet_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<wnid>/`, also inside noise, blur, weather, digital and extra."""
    folder = below(root, PUBLISHED["imagenet-c"])
    parts, missing, remarks = corrupted_parts(folder, ALL, lambda _: imagenet_labels(), name="imagenet-c")
    return Shift(
        name="imagenet-c",
        parts=parts,
        num_classes=NUM_CLASSES,
        cropped=True,
        benchmark=BENCHMARK,
        missing=missing,
        remarks=remarks,
    )
