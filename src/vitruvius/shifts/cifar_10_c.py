"""CIFAR-10-C: the corruptions of ImageNet-C for 32 × 32 images (Hendrycks & Dietterich 2019, arXiv:1903.12261)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._arrays import array_shift
from vitruvius.shifts._base import Shift, shifts


@shifts.register("cifar-10-c")
def cifar_10_c(root: Path) -> Shift:
    """`<corruption>.npy` with five times 10,000 images, and labels.npy.

    `root` is the folder of these files.
    """
    return array_shift(root, name="cifar-10-c", archive=("CIFAR-10-C",), num_classes=10)
