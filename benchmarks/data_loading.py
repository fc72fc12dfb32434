"""Images per second from a folder of JPEGs: our loader against timm's in the same run, same workers, same augmentation.

Files of ImageNet's usual size (500 × 375, about 100 kB) are made on the spot. Both loaders decode, crop to 224, flip,
jitter colours, and hand over float batches on the device; timm's normalises as well, ours leaves that to the model.
Rounds alternate; the median of each is reported.

    python -m benchmarks data_loading --images 6000 --workers 16
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader

from vitruvius._processes import usable_cores
from vitruvius.data import DataConfig, eval_loader, train_loader

SIZE = (3, 224, 224)


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    workers = options.workers or usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        size = make_folder(Path(folder), options.images, workers)
        print(f"{options.images} files of {size / 1000:.0f} kB made in {time.perf_counter() - begun:.0f} s", flush=True)
        print(f"torch {torch.__version__}, timm {timm.__version__}, {device}, {workers} workers, batch {options.batch}")
        for kind in ("training", "evaluation"):
            ours, theirs = (make(folder, options, workers, device, kind) for make in (our_loader, timm_loader))
            compare(kind, ours, theirs, options.rounds)
            del ours, theirs


def compare(kind: str, ours: Any, theirs: Any, rounds: int) -> None:
    """A round of each to warm up, then alternately."""
    rates: dict[str, list[float]] = {"ours": [], "timm": []}
    for number in range(rounds + 1):
        for name, loader in (("ours", ours), ("timm", theirs)):
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(number)
            rate = images_per_second(loader)
            if number:
                rates[name].append(rate)
    mine, yours = (statistics.median(rates[name]) for name in ("ours", "timm"))
    spread = ", ".join(f"{name} {min(r):.0f}–{max(r):.0f}" for name, r in rates.items())
    print(
        f"{kind}: ours {mine:.0f} images/s, timm {yours:.0f} images/s, ratio {mine / yours:.3f} ({spread})", flush=True
    )


def images_per_second(loader: Any) -> float:
    """One epoch, the device's work included."""
    begun, images, total = time.perf_counter(), 0, None
    for x, _ in loader:
        images += len(x)
        total = x[0, 0, 0, 0] if total is None else total + x[0, 0, 0, 0]  # the batch has arrived
    assert total is not None
    float(total)
    return images / (time.perf_counter() - begun)


def our_loader(folder: str, options: argparse.Namespace, workers: int, device: torch.device, kind: str) -> Any:
    config = DataConfig(
        dataset="folder", root=folder, val_split="train", batch_size=options.batch, workers=workers, crop_pct=0.875
    )
    if kind == "training":
        return train_loader(config, input_size=SIZE, seed=0, device=device)
    return eval_loader(config, input_size=SIZE, device=device)


def timm_loader(folder: str, options: argparse.Namespace, workers: int, device: torch.device, kind: str) -> Any:
    training = kind == "training"
    dataset = create_dataset("folder", root=f"{folder}/train", is_training=training, search_split=False)
    return create_loader(
        dataset,
        input_size=SIZE,
        batch_size=options.batch,
        is_training=training,
        color_jitter=0.4,
        interpolation="random" if training else "bicubic",
        crop_pct=0.875,
        num_workers=workers,
        device=device,
        pin_memory=device.type != "cpu",
    )


def make_folder(folder: Path, images: int, workers: int) -> float:
    """Mean size of the files, in bytes."""
    with ProcessPoolExecutor(workers) as pool:
        sizes = list(pool.map(make_image, [folder] * images, range(images), chunksize=16))
    return statistics.mean(sizes)


def make_image(folder: Path, number: int) -> int:
    """Smooth colours under fine grain: about as hard to decode as a photograph."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (500, 375), Image.Resampling.BICUBIC
    )
    grain = rng.normal(0, 14, (375, 500, 1))
    pixels = (np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)
    path = folder / "train" / f"class{number % 10}" / f"{number}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=88)
    return path.stat().st_size


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=0, help="0: one a core")
    parser.add_argument("--batch", type=int, default=64, help="several batches a worker: whole rounds hide rates")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
