"""Standard AutoAttack, all four stages: ours against the original code, on adversarially trained ViTs and real images.

    python -m benchmarks autoattack_standard --data cifar10.npz --only vit --original DIR --results aa.jsonl
    python -m benchmarks autoattack_standard --data cifar10.npz --only deit --original DIR --results aa.jsonl
    python -m benchmarks autoattack_standard --tiny                    a CPU: does everything run?

    vit   ViT-Tiny, 4×4 patches, CIFAR-10 at 32 pixels, trained in place against PGD; 1,000 test images at 8/255
    deit  DeiT-Tiny, CIFAR-10 enlarged to 224 pixels, trained in place against one step; 250 test images at 2/255

The original is pyautoattack 0.2.0, where it is installed or found in DIR. One process, one model, the same images; each
way runs once, after a few gradients to warm up. `--runs DIR` keeps the trained models, and uses those that
are there. Rows are printed and written as they come: seconds, images that stay robust, images on which a way and the
original differ. No way begins once `--seconds` are over, and what was left out is said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.models import load_model
from vitruvius.training import train

WARM_UP = 3  # gradients before the first way is timed


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, how it is trained, and what it is attacked with."""

    model: str
    size: int
    eps: float
    images: int
    batch: int  # of the search
    task: dict[str, Any]
    epochs: int
    train_batch: int
    train_images: int | None = None


PROBLEMS = {
    "vit": Problem(
        model="vitruvius/vit_tiny_patch4_32", size=32, eps=8 / 255, images=1000, batch=500, epochs=12, train_batch=512,
        task={"use": "adversarial", "eps": 8 / 255, "attack": {"use": "pgd", "steps": 2}},
    ),
    "deit": Problem(
        model="deit_tiny_patch16_224", size=224, eps=2 / 255, images=250, batch=250, epochs=3, train_batch=256,
        task={"use": "fast", "eps": 2 / 255, "method": "n_fgsm"}, train_images=40_000,
    ),
}  # fmt: skip
TINY = {
    "vit": Problem(
        model="vitruvius/vit_digits", size=8, eps=8 / 255, images=4, batch=4, epochs=1, train_batch=32,
        task={"use": "adversarial", "eps": 8 / 255, "attack": {"use": "pgd", "steps": 1}}, train_images=64,
    ),
    "deit": Problem(
        model="vitruvius/vit_digits", size=8, eps=2 / 255, images=4, batch=4, epochs=1, train_batch=32,
        task={"use": "fast", "eps": 2 / 255}, train_images=64,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="an .npz with x_train, y_train, x_test, y_test; random images without it")
    add("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS), help="by default both")
    add("--ways", nargs="+", default=["exact", "auto", "fast"], choices=["exact", "fast", "auto"], help="of ours")
    add("--original", type=Path, help="a folder that holds pyautoattack, if it is not installed")
    add("--runs", type=Path, help="keep the trained models here; by default they are thrown away")
    add("--seconds", type=float, default=540.0, help="begin no way after this many seconds; 540 by default")
    add("--results", type=Path, help="write every row here as it comes, a JSON object per line")
    add("--tiny", action="store_true", help="small models and few images")
    options = parser.parse_args()
    options.deadline = time.perf_counter() + options.seconds
    if options.original is not None:
        sys.path.insert(0, str(options.original))
    with tempfile.TemporaryDirectory(prefix="autoattack-") as folder:
        runs = options.runs or Path(folder)
        for name in options.only:
            problem = (TINY if options.tiny else PROBLEMS)[name]
            measure(name, problem, runs / name, options)


def measure(name: str, problem: Problem, run: Path, options: argparse.Namespace) -> None:
    """Train or load, then every way in turn."""
    begun = time.perf_counter()
    if not (run / "last.safetensors").exists():
        train(recipe(problem, run, options.data), quiet=True)
    model = load_model(run, best=False).eval()
    if torch.cuda.is_available():
        model.cuda()
    x, y = right_and_wrong(problem, options.data, next(model.parameters()))
    clean = accuracy(model, x, y)
    note(options, {"problem": name, "way": "training", "seconds": time.perf_counter() - begun, "clean": clean})
    ways: dict[str, Any] = {"original": original(problem)}
    for precision in options.ways:
        ways[precision] = AutoAttack(eps=problem.eps, precision=precision, batch_size=problem.batch)
    warm_up(model, x[: problem.batch], y[: problem.batch])
    rows: dict[str, tuple[float, Tensor]] = {}
    for way, attack in ways.items():
        if attack is None:
            continue
        if time.perf_counter() > options.deadline:
            note(options, {"problem": name, "way": way, "left_out": "the time was over"})
            continue
        rows[way] = attack_seconds(attack, model, x, y)
        note(options, {"problem": name, "way": way, **compare(rows, way), "images": len(x)})
    print_table(name, problem, rows)


def recipe(problem: Problem, run: Path, data: Path | None) -> dict[str, Any]:
    source: dict[str, Any] = {"dataset": "fake", "num_classes": 10, "val_num_samples": 64}
    if data is not None:
        source = {"dataset": "npz", "root": str(data), "val_split": "test", "val_num_samples": 512, "hflip": 0.5}
    if data is not None and problem.size == 32:
        source["pad"] = 4
    source |= {"batch_size": problem.train_batch, "workers": 0, "smoothing": 0.0, "cache": "auto"}
    if problem.train_images is not None:
        source["train_num_samples"] = problem.train_images
    settings = {
        "epochs": problem.epochs, "lr": 1e-3, "precision": "bf16", "clip_grad": 1.0, "holdout": 0, "select": "clean",
        "alarm": "none", "evaluate_every": problem.epochs,
    }  # fmt: skip
    if problem.epochs > 2:
        settings["warmup_epochs"] = 1
    model = {"name": problem.model}
    return {"model": model, "data": source, "task": problem.task, "train": settings, "out": str(run)}


def right_and_wrong(problem: Problem, data: Path | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Test images (B, C, H, W) in [0, 1] at the model's size, and their labels."""
    if data is None:
        channels = like.shape[1] if like.ndim == 4 else 3
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(problem.images, channels, problem.size, problem.size, generator=generator).to(like.device)
        return x, torch.arange(problem.images, device=like.device) % 10
    with np.load(data) as arrays:
        pixels = torch.from_numpy(arrays["x_test"][: problem.images]).movedim(-1, 1).contiguous().to(like.device) / 255
        labels = torch.from_numpy(arrays["y_test"][: problem.images].astype(np.int64)).to(like.device)
    if problem.size != pixels.shape[-1]:
        size = (problem.size, problem.size)
        pixels = nn.functional.interpolate(pixels, size=size, mode="bicubic", antialias=True).clamp(0, 1)
    return pixels, labels


def original(problem: Problem) -> Any:
    """The original code as an attack like ours; None where it is not installed."""
    try:
        import pyautoattack
    except ImportError:
        print("pyautoattack is not here: install it, or name its folder with --original", flush=True)
        return None

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = pyautoattack.AutoAttack(model, norm="Linf", eps=problem.eps, seed=0, device=str(x.device))
        found = made.run_standard_evaluation(x, y, batch_size=problem.batch)
        moved: Tensor = found[0] if isinstance(found, tuple) else found
        return moved.to(x.device)

    return attack


def warm_up(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Have libraries loaded and kernels chosen."""
    for _ in range(WARM_UP):
        pixels = x.clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(pixels), y)
        torch.autograd.grad(loss, pixels)


def attack_seconds(attack: Any, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Seconds, and which images are still robust, (B,) bool on the CPU."""
    synchronise()
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs are about their own code
        moved = attack(model, x, y)
    synchronise()
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        robust = torch.cat([model(part).argmax(1) for part in moved.split(250)]) == y
    return seconds, robust.cpu()


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((torch.cat([model(part).argmax(1) for part in x.split(250)]) == y).float().mean())


def compare(rows: dict[str, tuple[float, Tensor]], way: str) -> dict[str, Any]:
    """A way against the original: times as fast, and images on which they differ."""
    seconds, robust = rows[way]
    found: dict[str, Any] = {"seconds": seconds, "robust": int(robust.sum())}
    if "original" in rows:
        theirs = rows["original"]
        found["times"] = theirs[0] / seconds
        found["only_ours_breaks"] = int((theirs[1] & ~robust).sum())
        found["only_the_original_breaks"] = int((robust & ~theirs[1]).sum())
    return found


def note(options: argparse.Namespace, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if options.results is not None:
        with options.results.open("a") as file:
            file.write(f"{line}\n")


def print_table(name: str, problem: Problem, rows: dict[str, tuple[float, Tensor]]) -> None:
    print(
        f"\n{name}: {problem.model}, {problem.images} images, Linf {problem.eps * 255:g}/255, torch {torch.__version__}"
    )
    print("| way | seconds | times | robust | only ours breaks | only the original |\n|---|---|---|---|---|---|")
    for way in rows:
        row = compare(rows, way)
        cells = [row.get(key, "") for key in ("only_ours_breaks", "only_the_original_breaks")]
        print(f"| {way} | {row['seconds']:.1f} | {row.get('times', float('nan')):.2f} | {row['robust']} | {cells[0]} | {cells[1]} |")  # fmt: skip  # noqa: E501


if __name__ == "__main__":
    main()
