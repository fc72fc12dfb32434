"""Writes tests/golden/corruptions.safetensors with imagecorruptions-imaug 1.1.5; run this file to write it again.

`image` (72, 76, 3) uint8, a piece of scikit-learn's china.jpg (danielbuechele, CC BY 2.0); `NAME` (72, 76, 3), the
image under a corruption without chance at severity 5; `NAME.statistics` (5, 3), one row a severity: mean, standard
deviation and mean absolute value of the difference to the image in levels, over 24 draws of the package.
"""

from __future__ import annotations

from pathlib import Path

import imagecorruptions
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from vitruvius._files import save_tensors

CERTAIN = ["brightness", "contrast", "saturate", "pixelate", "jpeg_compression", "defocus_blur", "gaussian_blur"]
CERTAIN += ["zoom_blur"]
CHANCE = [
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "speckle_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
]
CHANCE += ["fog", "spatter"]
DRAWS = 24


def main() -> None:
    np.random.seed(0)  # noqa: NPY002 (the package draws from the global numbers)
    photograph = Image.fromarray(load_sample_image("china.jpg")).crop((180, 60, 180 + 228, 60 + 216))
    image = np.array(photograph.resize((76, 72), Image.Resampling.BICUBIC))
    tensors = {"image": torch.from_numpy(image)}
    for name in CERTAIN:
        tensors[name] = torch.from_numpy(imagecorruptions.corrupt(image, severity=5, corruption_name=name).copy())
    for name in CERTAIN + CHANCE:
        draws = DRAWS if name in CHANCE else 1
        rows = [statistics(image, name, severity, draws) for severity in (1, 2, 3, 4, 5)]
        tensors[f"{name}.statistics"] = torch.tensor(rows, dtype=torch.float64)
    save_tensors(
        Path(__file__).parents[1] / "golden" / "corruptions.safetensors",
        tensors,
        {"by": "imagecorruptions-imaug 1.1.5"},
    )


def statistics(image: np.ndarray, name: str, severity: int, draws: int) -> list[float]:
    moved = [imagecorruptions.corrupt(image, severity=severity, corruption_name=name) for _ in range(draws)]
    difference = np.stack(moved).astype(float) - image
    return [difference.mean(), difference.std(), np.abs(difference).mean()]


if __name__ == "__main__":
    main()
