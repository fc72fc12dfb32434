"""How fast is a training step of ours, plain and adversarial, against loops written around upstream timm?

    python benchmarks/adversarial_training.py                    an accelerator: DeiT-Tiny and XCiT-S12 at 224
    python benchmarks/adversarial_training.py --rehearse         a CPU: tiny models, to see that everything runs

Every contestant is a process of its own. All compile and warm up at the same time; then they are timed one after the
other, several rounds in turn, alone on the device, and the median counts. Images lie on the device.

deit_bare        DeiT-Tiny, bfloat16 autocast, torch.compile, AdamW: a bare loop around timm on normalised images
deit_ours        the same through our loop: loader, normalisation in the model, schedule, numbers for the log
xcit_plain       XCiT-S12 as the light recipe's step is built: float32, eager, attack + clean forward with its graph +
                 adversarial forward and backward (xcit_plain_tf32: the same with TF32 matrix products)
xcit_ours        task: adversarial through our loop, bfloat16, compiled, no clean pass (xcit_ours_eager: not compiled)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPS = 4 / 255
CONTESTANTS = ["deit_bare", "deit_ours", "xcit_plain", "xcit_plain_tf32", "xcit_ours", "xcit_ours_eager"]
FULL: dict[str, Any] = {
    "deit": "deit_tiny_patch16_224",
    "xcit": "xcit_small_12_p16_224",
    "batch": {"deit": 256, "xcit": 128},
    "classes": 1000,
    "backend": "inductor",
    "steps": {"deit": 100, "xcit": 20},  # batches in a round
}
SMALL: dict[str, Any] = {
    "deit": "test_vit",
    "xcit": "xcit_nano_12_p16_224",
    "batch": {"deit": 4, "xcit": 2},
    "classes": 4,
    "backend": "eager",
    "steps": {"deit": 2, "xcit": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, no compiler")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = SMALL if options.rehearse else FULL
    if options.contestant:
        return compete(options.contestant, settings)
    seconds = contest(options.only, options.rounds, options.rehearse)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        steps = settings["steps"][name[:4]]
        images = settings["batch"][name[:4]] * steps
        spread = max(seconds[name]) / min(seconds[name])
        step = 1e3 * median / steps
        print(f"{name:16s} {images / median:9.0f} images/s   {step:8.2f} ms/step   ×{spread:.3f}")
    compare(medians)
    if options.out:
        options.out.write_text(json.dumps({"seconds": seconds, "settings": settings}, indent=1))


def compare(medians: dict[str, float]) -> None:
    """The two ratios that are promised, and two more."""
    pairs = [
        ("deit_bare", "deit_ours", "speed of our loop against a bare one (promised: at least 0.97)"),
        ("xcit_ours", "xcit_plain", "time of our adversarial step against the light recipe's (promised: at most 0.45)"),
        ("xcit_ours", "xcit_plain_tf32", "the same with TF32 for theirs"),
        ("xcit_ours", "xcit_ours_eager", "what the compiler leaves of our step"),
    ]
    for over, under, meaning in pairs:
        if over in medians and under in medians:
            print(f"{medians[over] / medians[under]:.3f}   {meaning}")


# The contest: processes that warm up together and run one at a time.


def contest(names: list[str], rounds: int, rehearse: bool) -> dict[str, list[float]]:
    """Seconds of every round of every contestant."""
    command = [sys.executable, __file__, *(["--rehearse"] if rehearse else []), "--contestant"]
    begun = time.perf_counter()
    running = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in names
    }
    for name in list(running):
        answer = hear(running[name])
        print(f"{name}: {answer or 'failed'} after {time.perf_counter() - begun:.0f} s", flush=True)
        if answer != "ready":
            running.pop(name)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, process in running.items():
            print("go", file=process.stdin, flush=True)
            seconds[name].append(float(hear(process)))
    for process in running.values():
        process.communicate()
    return seconds


def hear(process: subprocess.Popen[str]) -> str:
    """The next line a contestant means for us."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("#"):
            return line[1:].strip()
    return ""


def compete(name: str, settings: dict[str, Any]) -> None:
    """Warm up, then run a round for every line that comes."""
    import torch

    play = PLAYERS[name](name, settings)
    for _ in range(2):
        play()
    synchronise(torch)
    print("#ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        play()
        synchronise(torch)
        print(f"#{time.perf_counter() - begun}", flush=True)


def synchronise(torch: Any) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def device_of(torch: Any) -> Any:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


# Loops around upstream timm, written plainly.


def bare_deit(name: str, settings: dict[str, Any]) -> Callable[[], None]:
    """Supervised training."""
    import timm
    import torch
    import torch.nn.functional as F

    device = device_of(torch)
    model = timm.create_model(settings["deit"], num_classes=settings["classes"]).to(device).train()
    size = model.pretrained_cfg["input_size"]
    x, y = images(torch, device, size, "deit", settings)
    x = (x - 0.5) / 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    forward = torch.compile(model, backend=settings["backend"])

    def play() -> None:
        for batch, labels in zip(x, y, strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(forward(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return play


def plain_xcit(name: str, settings: dict[str, Any]) -> Callable[[], None]:
    """The light recipe's step: attack in eval mode, clean pass with a graph, adversarial pass, backward."""
    import timm
    import torch
    import torch.nn.functional as F

    if name.endswith("tf32"):
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cudnn.allow_tf32 = False
    device = device_of(torch)
    model = timm.create_model(settings["xcit"], num_classes=settings["classes"], drop_path_rate=0.05).to(device)
    x, y = images(torch, device, (3, 224, 224), "xcit", settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.5)

    def attack(batch: Any, labels: Any) -> Any:
        moved = (batch + torch.empty_like(batch).uniform_(-EPS, EPS)).clamp(0, 1).requires_grad_()
        loss = F.cross_entropy(model(moved), labels, reduction="sum")
        (grad,) = torch.autograd.grad(loss, moved)
        moved = moved.detach() + 1.5 * EPS * grad.sign()
        return (batch + (moved - batch).clamp(-EPS, EPS)).clamp(0, 1)

    def play() -> None:
        for batch, labels in zip(x, y, strict=True):
            model.eval()
            moved = attack(batch, labels)
            model.train()
            clean = model(batch)  # for a metric alone
            loss = F.cross_entropy(model(moved), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del clean

    return play


def images(
    torch: Any, device: Any, size: tuple[int, int, int], family: str, settings: dict[str, Any]
) -> tuple[Any, Any]:
    """(steps, B, C, H, W) pixels and (steps, B) labels on the device."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (settings["steps"][family], settings["batch"][family], *size)
    x = torch.rand(shape, generator=generator, device=device)
    y = torch.randint(settings["classes"], x.shape[:2], generator=generator, device=device)
    return x, y


# Our loop.


def ours(name: str, settings: dict[str, Any]) -> Callable[[], None]:
    """An epoch of the loop over images that lie on the device."""
    from vitruvius._config import build
    from vitruvius._processes import process_group
    from vitruvius.training import Config
    from vitruvius.training.loop import Trainer
    from vitruvius.training.losses import Means
    from vitruvius.training.session import open_session

    with process_group("auto") as process:
        session = open_session(build(Config, recipe(name, settings), source=name), process)

    def play() -> None:
        session.batch, session.means = 0, Means(session.process)
        Trainer(session).train_epoch()
        session.epoch += 1

    return play


def recipe(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    family = name[:4]
    batch = settings["batch"][family]
    compiled = False if name.endswith("eager") else settings["backend"]
    data = {
        "dataset": "fake", "num_classes": settings["classes"], "batch_size": batch, "workers": 0, "smoothing": 0.0,
        "train_num_samples": batch * settings["steps"][family], "val_num_samples": batch,
    }  # fmt: skip
    train = {"epochs": 1000, "precision": "bf16", "compile": compiled, "holdout": 0, "select": "clean", "alarm": "none"}
    if family == "deit":
        return {"model": {"name": settings["deit"]}, "data": data, "train": {**train, "weight_decay": 0.05}}
    task = {
        "use": "adversarial", "eps": EPS, "attack": {"use": "pgd", "steps": 1}, "coupled": False, "smoothing": 0.1,
    }  # fmt: skip
    model = {"name": settings["xcit"], "kwargs": {"drop_path_rate": 0.05}, "mean": [0.0] * 3, "std": [1.0] * 3}
    optimised = {"lr": 5e-4, "weight_decay": 0.5, "channels_last": True}
    return {"model": model, "data": data, "task": task, "train": {**train, **optimised}}


PLAYERS: dict[str, Callable[[str, dict[str, Any]], Callable[[], None]]] = {
    "deit_bare": bare_deit,
    "deit_ours": ours,
    "xcit_plain": plain_xcit,
    "xcit_plain_tf32": plain_xcit,
    "xcit_ours": ours,
    "xcit_ours_eager": ours,
}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main()
