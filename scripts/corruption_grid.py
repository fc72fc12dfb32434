"""Every corruption at every severity on a photograph and on a hand-written digit: the pictures of docs/corruptions.md.

    python scripts/corruption_grid.py --out docs/figures

The photograph is scikit-learn's china.jpg (danielbuechele, CC BY 2.0).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor

from vitruvius.corruptions.base import IMAGENET_C, SEVERITIES, corruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--size", type=int, default=224, help="pixels of the photograph that is corrupted")
    parser.add_argument("--textures", help="folder with photographs of frost")
    out = parser.parse_args()
    photograph = Image.fromarray(load_sample_image("china.jpg")).crop((150, 30, 510, 390))
    pixels = torch.from_numpy(np.array(photograph.resize((out.size, out.size), Image.Resampling.BICUBIC)))
    digit = torch.from_numpy(load_digits().images[3]).float()[None, None] / 16
    draw(pixels.movedim(-1, 0)[None].float() / 255, out.out / "corruptions.png", out.textures, shown=80)
    draw(digit, out.out / "corruptions_digits.png", None, shown=40)


def draw(x: Tensor, file: Path, textures: str | None, *, shown: int) -> None:
    """Rows are corruptions in two blocks of columns, columns are severities, in full colour."""
    half = -(-len(IMAGENET_C) // 2)
    sheet = np.ones((half * (shown + 2), 2 * (len(SEVERITIES) * (shown + 2)) + 150 * 2, 3))
    for number, name in enumerate(IMAGENET_C):
        block, row = divmod(number, half)
        for severity in SEVERITIES:
            more = {"textures": textures} if name == "frost" and textures else {}
            picture = corruptions[name](severity=severity, **more).apply(x, ids=torch.tensor([7]))
            tile = shrunk(picture, shown)
            left = block * (sheet.shape[1] // 2) + 150 + (severity - 1) * (shown + 2)
            sheet[row * (shown + 2) : row * (shown + 2) + shown, left : left + shown] = tile
    figure = plt.figure(figsize=(sheet.shape[1] / 100, sheet.shape[0] / 100), dpi=100)
    figure.figimage(np.flipud(sheet), origin="lower")
    for number, name in enumerate(IMAGENET_C):
        block, row = divmod(number, half)
        x0, y0 = block / 2 + 142 / sheet.shape[1], 1 - (row * (shown + 2) + shown / 2) / sheet.shape[0]
        figure.text(x0, y0, name.replace("_", " "), ha="right", va="center", fontsize=9.5)
    figure.savefig(file, dpi=100)
    plt.close(figure)
    Image.open(file).convert("RGB").save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def shrunk(picture: Tensor, shown: int) -> np.ndarray:
    """(shown, shown, 3) for the sheet; small images as blocks."""
    colour = picture.expand(-1, 3, -1, -1)[0].movedim(0, -1).mul(255).round().byte().numpy()
    way = Image.Resampling.LANCZOS if picture.shape[-1] > shown else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(colour).resize((shown, shown), way)) / 255


if __name__ == "__main__":
    main()
