"""Time per image of the training transform in whole batches, against timm's transform image by image; one CPU thread.

Both start from decoded 32 × 32 images in memory and end with a batch of floats: crop, flip and what each row names. CPU
time is counted; rounds alternate, and the fastest of each is reported, which a busy machine disturbs least.

    python -m benchmarks augmentation
    python -m benchmarks augmentation --device cuda --batch 1024
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import PIL
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from vitruvius.data import DataConfig
from vitruvius.data._image_seeds import image_keys
from vitruvius.data._preprocessing import resolve, train_transform
from vitruvius.data.augmentation.pipeline import BatchAugmentation

ROWS = {
    "resized crop": {"color_jitter": 0.0},
    "padded crop": {"color_jitter": 0.0, "rand_crop": True, "pad": 4},
    "colour jitter": {},
    "RandAugment": {"aa": "rand-m9-mstd0.5-inc1"},
    "RandAugment, erasing": {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25},
    "AutoAugment": {"aa": "original"},
    "3-Augment": {"aa": "3a"},
    "AugMix": {"aa": "augmix-m5-w4-d2"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=32, help="pixels")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu", help="of ours; timm's works on PIL images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = pictures(options.batch, options.size)
    print(f"torch {torch.__version__}, timm {timm.__version__}, Pillow {PIL.__version__}, one thread")
    print(f"batches of {options.batch} images of {options.size} px; ours on {options.device}; microseconds per image")
    for name, settings in ROWS.items():
        ours, theirs = measure(images, DataConfig(**settings), options)  # type: ignore[arg-type]
        print(f"{name:<22} timm {theirs:7.1f}   ours {ours:7.1f}   ratio {theirs / ours:5.2f}", flush=True)


def measure(images: list[Image.Image], config: DataConfig, options: argparse.Namespace) -> tuple[float, float]:
    """Microseconds per image: ours, timm's."""
    pre = resolve(config, (3, options.size, options.size))
    one_by_one = train_transform(config, pre)
    together = BatchAugmentation(config, pre)
    stored = torch.stack([torch.from_numpy(np.array(image)).movedim(-1, 0) for image in images]).to(options.device)
    ids = torch.arange(len(images))

    def ours(number: int) -> Tensor:
        keys = image_keys(ids, torch.zeros_like(ids), seed=0, epoch=number)
        return together(stored, keys)

    def theirs(_: int) -> Tensor:
        return torch.stack([one_by_one(image) for image in images]).float()

    return alternate(ours, theirs, len(images), options)


def alternate(
    ours: Callable[[int], Tensor], theirs: Callable[[int], Tensor], count: int, options: argparse.Namespace
) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds + 1):
        for make, kept in zip((ours, theirs), times, strict=True):
            clock = time.process_time if options.device == "cpu" else time.perf_counter
            begun = clock()
            make(number)
            if options.device != "cpu":
                torch.accelerator.synchronize()
            if number:
                kept.append((clock() - begun) / count * 1e6)
    return min(times[0]), min(times[1])


def pictures(count: int, size: int) -> list[Image.Image]:
    """Pieces of scikit-learn's two photographs."""
    whole = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    made = []
    for number in range(count):
        left, top = 3 * number % 300, 2 * number % 200
        piece = whole[number % 2].crop((left, top, left + 200, top + 200))
        made.append(piece.resize((size, size), Image.Resampling.BILINEAR))
    return made


if __name__ == "__main__":
    main()
