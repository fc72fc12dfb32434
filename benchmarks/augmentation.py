"""Time per image of the training transform in whole batches, against timm's transform image by image; one CPU thread.

Both start from decoded 32 × 32 images in memory and end with a batch of floats: crop, flip and what each row names. CPU
time is counted; rounds alternate, and the fastest of each is reported, which a busy machine disturbs least.

    python -m benchmarks augmentation
    python -m benchmarks augmentation --device cuda --batch 1024
    python -m benchmarks augmentation --others            torchvision's v2 and kornia too, with RandAugment

torchvision's v2 transforms draw one set of parameters for all that they are given, so they run image by image, on
uint8 tensors. Kornia's crops and flips draw for every image of a batch; its RandAugment draws one operation for all.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import PIL
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from vitruvius._random import image_keys
from vitruvius.data import DataConfig
from vitruvius.data.augmentation.pipeline import BatchAugmentation
from vitruvius.data.preprocessing import resolve, train_transform

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
    parser.add_argument("--others", action="store_true", help="torchvision's v2, and kornia where it is installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = pictures(options.batch, options.size)
    print(f"torch {torch.__version__}, timm {timm.__version__}, Pillow {PIL.__version__}, one thread")
    print(f"batches of {options.batch} images of {options.size} px; ours on {options.device}; microseconds per image")
    if options.others:
        measure_others(images, options)
        return
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

    mine, timms = alternate([ours, theirs], len(images), options)
    return mine, timms


def measure_others(images: list[Image.Image], options: argparse.Namespace) -> None:
    """Resized crop, flip and RandAugment by everybody in turn; microseconds per image."""
    config = DataConfig(aa="rand-m9-mstd0.5-inc1")
    pre = resolve(config, (3, options.size, options.size))
    one_by_one, together = train_transform(config, pre), BatchAugmentation(config, pre)
    stored = torch.stack([torch.from_numpy(np.array(image)).movedim(-1, 0) for image in images])
    ids = torch.arange(len(images))
    ways: dict[str, Callable[[int], Tensor]] = {
        "ours, whole batches": lambda number: together(
            stored, image_keys(ids, torch.zeros_like(ids), seed=0, epoch=number)
        ),
        "timm, image by image": lambda _: torch.stack([one_by_one(image) for image in images]).float(),
        "torchvision v2, image by image": by_torchvision(stored, options.size),
    }
    with contextlib.suppress(ImportError):
        ways["kornia, whole batches"] = by_kornia(stored, options.size)
    times = dict(zip(ways, alternate(list(ways.values()), len(images), options), strict=True))
    for name, microseconds in times.items():
        print(f"{name:<32} {microseconds:7.1f}   of ours {microseconds / times['ours, whole batches']:5.2f}")


def by_torchvision(stored: Tensor, size: int) -> Callable[[int], Tensor]:
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(num_ops=2, magnitude=9),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return lambda _: torch.stack([transform(image) for image in stored])


def by_kornia(stored: Tensor, size: int) -> Callable[[int], Tensor]:
    import kornia.augmentation as kornia
    from kornia.augmentation.auto import RandAugment

    transform = torch.nn.Sequential(
        kornia.RandomResizedCrop((size, size)), kornia.RandomHorizontalFlip(), RandAugment(n=2, m=9)
    )
    return lambda _: transform(stored / 255)


def alternate(makers: Sequence[Callable[[int], Tensor]], count: int, options: argparse.Namespace) -> list[float]:
    """The fastest round of each, in microseconds per image."""
    times: list[list[float]] = [[] for _ in makers]
    for number in range(options.rounds + 1):
        for make, kept in zip(makers, times, strict=True):
            clock = time.process_time if options.device == "cpu" else time.perf_counter
            begun = clock()
            make(number)
            if options.device != "cpu":
                torch.accelerator.synchronize()
            if number:
                kept.append((clock() - begun) / count * 1e6)
    return [min(kept) for kept in times]


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
