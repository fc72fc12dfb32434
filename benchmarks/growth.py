"""Processor time and memory against the number of images, tokens and runs: one table, a few minutes.

    python -m benchmarks growth

One thread. Each row runs in a process of its own, forked when everything is imported; memory is what the peak of that
process grew by. Images are of 2 × 2 pixels before a linear model, so that what is measured is the evaluation and not a
model. Tokens come from images of 64 to 448 pixels before a DeiT-Tiny. Runs are copies of one epoch on digits.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import vitruvius
from vitruvius.cli import main as command

IMAGES = (1_000, 10_000, 100_000, 1_000_000)
SIZES = (64, 112, 224, 448)  # pixels: 17, 50, 197, 785 tokens
RUNS = (1, 10, 100)
Work = Callable[[], object]


def evaluation(count: int) -> Work:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    x, y, ids = torch.rand(count, 3, 2, 2), torch.zeros(count, dtype=torch.long), torch.arange(count)
    batches = list(zip(x.split(500), y.split(500), ids.split(500), strict=True))
    return lambda: vitruvius.evaluate(model, batches)


def tokens(size: int) -> Iterator[tuple[str, Work]]:
    """A gradient of four images by two kinds of attention, and two analyses of one."""
    plain = timm.create_model("deit_tiny_patch16_224", img_size=size).eval().requires_grad_(False)
    robust = timm.create_model("deit_tiny_patch16_224", img_size=size).eval().requires_grad_(False)
    vitruvius.rewire(robust, {"use": "rpc", "iterations": 2})
    x = torch.rand(4, 3, size, size)

    def gradient(model: nn.Module) -> Work:
        def work() -> object:
            pixels = x.clone().requires_grad_()
            return torch.autograd.grad(model(pixels).sum(), pixels)

        return work

    yield "gradient of 4 images, softmax", gradient(plain)
    yield "gradient of 4 images, rpc in two iterations", gradient(robust)
    for name in ("entropy", "value_vectors"):
        yield f"analysis of an image, {name}", lambda name=name: vitruvius.analyse(plain, [x[:1]], name, nulls=False)


def page(folders: list[Path], out: Path) -> Work:
    return lambda: command(["report", *map(str, folders), "--out", str(out)])


def measure(work: Work) -> tuple[float, float]:
    """Processor seconds of one call, the first, and MiB by which the peak of memory grew."""
    context: Any = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            work()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        answers.put((time.process_time() - begun, grown / 1024))

    process = context.Process(target=child)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a measured process ended with {process.exitcode}.")
    answer: tuple[float, float] = answers.get()
    return answer


def show(what: str, count: int, unit: str, work: Work) -> None:
    seconds, memory = measure(work)
    print(
        f"| {what} | {count:,} {unit} | {seconds:.2f} s | {1e3 * seconds / count:.3g} ms | {memory:,.0f} MiB |",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    print("| | | processor | each | memory |\n|---|---:|---:|---:|---:|")
    for count in IMAGES:
        show("`evaluate`, a linear model", count, "images", evaluation(count))
    for size in SIZES:
        for what, work in tokens(size):
            show(what, (size // 16) ** 2 + 1, "tokens", work)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        first = home / "run_0"
        with contextlib.redirect_stdout(io.StringIO()):
            command(["train", "digits/softmax", "train.epochs=1", f"out={first}"])
        folders = [first] + [Path(shutil.copytree(first, home / f"run_{n}")) for n in range(1, max(RUNS))]
        for count in RUNS:
            show("`report`, a page", count, "runs", page(folders[:count], home / f"page_{count}.html"))


if __name__ == "__main__":
    main()
