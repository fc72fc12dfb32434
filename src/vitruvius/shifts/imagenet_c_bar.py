"""ImageNet-C-bar: 10 corruptions at 5 severities, unlike those of ImageNet-C (Mintun et al. 2021, arXiv:2102.11273)."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._corrupted import corrupted_imagenet

BAR = (
    *("blue_noise_sample", "brownish_noise", "caustic_refraction", "checkerboard_cutout", "cocentric_sine_waves"),
    *("inverse_sparkles", "perlin_noise", "plasma_noise", "single_frequency_greyscale", "sparkles"),
)


@shifts.register("imagenet-c-bar")
def imagenet_c_bar(root: Path) -> Shift:
    """`<corruption>/<severity>/<wnid>/`, ten corruptions of its own.

    `root` is the folder above the corruptions.
    """
    return corrupted_imagenet(root, "imagenet-c-bar", BAR, archive=("imagenet-c-bar", "imagenet_c_bar"))
