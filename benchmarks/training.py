"""Training steps: bare loops around timm, compiled and with CUDA graphs, against `vitruvius train`, in one table.

    python -m benchmarks training --data cifar10.npz --results training.jsonl      an accelerator, 300 s at most
    python -m benchmarks training --only deit p4.ours --rounds 5                   parts of it
    python -m benchmarks training --tiny                                           a CPU: does everything run?

    deit   DeiT-Tiny at 224, batch 256, random images          p4.pgd  ViT-Tiny p4/32 against PGD with two steps
    p4     ViT-Tiny, 4×4 patches, CIFAR-10, batch 512          xcit    XCiT-S12 p4/32, TRADES with ten steps, batch 64
    p2     ViT-Tiny, 2×2 patches, CIFAR-10, batch 512

    bare        an eager loop around timm: a batch by index, its normalisation, the step, fused AdamW; no augmentation
    compiled    the same loop, the model by torch.compile
    graphs      the same loop, torch.compile with mode="reduce-overhead"
    ours        `vitruvius train` with train.compile: auto, images on the device; padding and flips on CIFAR-10
    ours-eager  the same with train.compile: false;  ours-again: the same, on the compile cache that `ours` has left
    rpc2, rpc4  robust attention with two and four iterations in all layers

Parts and contestants are named as in `deit`, `p4.ours`; some run only if they are named (`deit.rpc4-compiled`).
Every contestant is a process with a compile cache of its own. Several warm up at a time (`--together`); then all are
timed in turn, alone on the device, and the median of the rounds counts. A round is an epoch. *cold*: the seconds that
the first epoch took longer than a round, while others were starting too. All events go to `--results` as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _contest import Answer, Contestant, take_turns, warm_up

EPS = 8 / 255
ROUND_LIMIT = 40.0  # seconds
WARM_UP_SHARE = 0.7  # of all seconds; what is not ready by then is not timed


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model, its data and its task."""

    model: str
    batch: int
    steps: int  # batches in a round
    task: str = "natural"  # natural, pgd or trades
    attack_steps: int = 0
    classes: int = 10
    size: int = 32
    cifar: bool = True
    drop_path: float = 0.0


PARTS = {
    "deit": Part(model="deit_tiny_patch16_224", batch=256, steps=30, classes=1000, size=224, cifar=False),
    "p4": Part(model="vitruvius/vit_tiny_patch4_32", batch=512, steps=60),
    "p2": Part(model="vitruvius/vit_tiny_patch2_32", batch=512, steps=30),
    "p4.pgd": Part(model="vitruvius/vit_tiny_patch4_32", batch=512, steps=30, task="pgd", attack_steps=2),
    "xcit": Part(
        model="vitruvius/xcit_small_12_p4_32", batch=64, steps=16, task="trades", attack_steps=10, drop_path=0.05
    ),
}
TINY = {
    "deit": Part(model="test_vit", batch=4, steps=2, classes=10, size=160, cifar=False),
    "p4": Part(model="vitruvius/vit_tiny_patch4_32", batch=4, steps=2),
    "p2": Part(model="vitruvius/vit_tiny_patch4_32", batch=4, steps=2),
    "p4.pgd": Part(model="vitruvius/vit_tiny_patch4_32", batch=4, steps=2, task="pgd", attack_steps=2),
    "xcit": Part(model="vitruvius/xcit_small_12_p4_32", batch=2, steps=1, task="trades", attack_steps=1),
}
WAYS = {
    "xcit": ("ours", "ours-eager-fp32", "ours-eager", "ours-again", "ours-fp32"),
    "deit": (
        "ours", "graphs", "rpc4-ours", "rpc2-ours", "compiled", "rpc4-graphs", "bare", "ours-again", "rpc4-compiled",
    ),
    "p4": ("ours", "graphs", "compiled", "rpc4-ours", "rpc2-ours", "ours-randaugment", "bare"),
    "p2": ("ours", "graphs", "compiled", "rpc4-ours", "rpc2-ours", "bare"),
    "p4.pgd": ("ours", "graphs", "compiled", "bare", "rpc4-ours"),
}  # fmt: skip
NAMES = [f"{part}.{way}" for part, ways in WAYS.items() for way in ways]
EXTRA = ("xcit.ours-fp32", "deit.rpc4-compiled", "p4.pgd.rpc4-ours")  # run where they are named
BARS = (  # what is promised: (contestant, reference, at least)
    ("p4.ours", ("p4.bare", "p4.compiled", "p4.graphs"), 0.97),
    ("p2.ours", ("p2.bare", "p2.compiled", "p2.graphs"), 0.97),
    ("deit.rpc2-ours", ("deit.graphs",), 0.90),
    ("deit.rpc4-ours", ("deit.graphs",), 0.80),
    ("deit.ours", ("deit.compiled",), 0.95),
    ("xcit.ours", ("xcit.ours-eager-fp32",), 4.0),
)
RATES = (("p4.pgd.ours", 15_000),)  # at least so many images per second
STARTS = (("deit.ours", 20.0), ("xcit.ours", 60.0))  # at most so many seconds cold


def main() -> None:
    options = read_options()
    if options.contestant:
        compete(options.contestant, options)
        return
    names = chosen(options.only)
    begun = time.perf_counter()
    deadline = begun + options.seconds
    with tempfile.TemporaryDirectory(prefix="training-", ignore_cleanup_errors=True) as folder:
        contestants = [make_contestant(name, options, Path(folder)) for name in names]
        book = Book(options.results)
        book.note(machine(options))
        try:
            ready_by = begun + WARM_UP_SHARE * options.seconds
            warm_up(contestants, book.note, together=options.together, limit=options.limit, deadline=ready_by)
            take_turns(contestants, book.note, rounds=options.rounds, limit=ROUND_LIMIT, deadline=deadline)
        finally:
            for one in contestants:
                one.end()
        rows = summarise(contestants, TINY if options.tiny else PARTS)
        for row in rows:
            book.note({"event": "result", **row})
    print_table(rows)
    print(f"{time.perf_counter() - begun:.0f} s in all")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0))
    add("--data", type=Path, help="an .npz with x_train (N, 32, 32, 3) and y_train; random images without it")
    add("--results", type=Path, help="write every event here as it comes, a JSON object per line")
    add("--only", nargs="+", default=[], help="parts (deit) or contestants (p4.ours); by default all")
    add("--rounds", type=int, default=3, help="timed rounds of each contestant; 3 by default")
    add("--together", type=int, default=max(1, cores // 2), help="warm-ups at a time; by default half the cores")
    add("--limit", type=float, default=110.0, help="seconds within which a contestant must be ready; 110 by default")
    add("--seconds", type=float, default=280.0, help="start no round after so many seconds; 280 by default")
    add("--tiny", action="store_true", help="small sizes, no compiler: to see on a CPU that everything runs")
    add("--contestant", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(only: Iterable[str]) -> list[str]:
    """Contestants of the parts and names asked for, in the order in which they start."""
    asked = list(only)
    unknown = [name for name in asked if name not in NAMES and name not in WAYS]
    if unknown:
        raise SystemExit(f"no part or contestant named {unknown[0]!r}. Known: {', '.join([*WAYS, *NAMES])}.")
    if not asked:
        return [name for name in NAMES if name not in EXTRA]
    return [name for name in NAMES if name in asked or split_name(name)[0] in asked]


def split_name(name: str) -> tuple[str, str]:
    """`p4.pgd.ours` → (`p4.pgd`, `ours`)."""
    part, _, way = name.rpartition(".")
    return part, way


def make_contestant(name: str, options: argparse.Namespace, folder: Path) -> Contestant:
    command = [sys.executable, __file__, "--contestant", name, "--folder", str(folder / name)]
    if options.tiny:
        command.append("--tiny")
    if options.data is not None:
        command += ["--data", str(options.data)]
    cached = name.removesuffix("-again")
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{cached}.inductor"),
        "TRITON_CACHE_DIR": str(folder / f"{cached}.triton"),
    }
    after = ""
    if cached != name:
        after = cached
    return Contestant(name=name, command=command, log=folder / f"{name}.log", settings=caches, after=after)


def machine(options: argparse.Namespace) -> Answer:
    """What the figures belong to."""
    import timm
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "timm": timm.__version__, "date": time.strftime("%Y-%m-%d")}
    cores = len(os.sched_getaffinity(0))
    return {"event": "machine", "device": device, "cores": cores, "together": options.together, **versions}


class Book:
    """Events, printed and written as they come."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.begun = time.perf_counter()

    def note(self, event: Answer) -> None:
        line = json.dumps({**event, "at_s": round(time.perf_counter() - self.begun, 1)})
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{line}\n")
        if event["event"] != "result":
            print(line, flush=True)


# The table.


def summarise(contestants: Iterable[Contestant], parts: dict[str, Part]) -> list[Answer]:
    """A row for each contestant: rate, cold start, spread, and the ratios to the bare loops of its part."""
    rows: dict[str, Answer] = {}
    for one in contestants:
        row: Answer = {"name": one.name, "failure": one.failure}
        if one.rounds and one.ready is not None:
            seconds = [float(answer["seconds"]) for answer in one.rounds]
            median = statistics.median(seconds)
            row["images_per_s"] = one.rounds[0]["images"] / median
            row["ms_per_step"] = 1e3 * median / parts[split_name(one.name)[0]].steps
            row["spread"] = max(seconds) / min(seconds)
            row["cold_s"] = max(0.0, one.ready["first_s"] - median)
            row["gib"] = one.rounds[-1].get("gib")
        rows[one.name] = row
    for name, row in rows.items():
        for way in ("bare", "compiled", "graphs"):
            row[f"of_{way}"] = ratio(rows, name, [f"{split_name(name)[0]}.{way}"])
    return list(rows.values())


def ratio(rows: dict[str, Answer], name: str, references: Iterable[str]) -> float | None:
    """The rate of one over the fastest of others; None where one of the two was not measured."""
    rates = [rows[other]["images_per_s"] for other in references if "images_per_s" in rows.get(other, {})]
    if not rates or "images_per_s" not in rows.get(name, {}):
        return None
    return float(rows[name]["images_per_s"] / max(rates))


def print_table(rows: list[Answer]) -> None:
    print(f"\n{'':24s}images/s   ms/step  spread   cold s   of bare  compiled   graphs")
    for row in sorted(rows, key=lambda row: split_name(row["name"])[0]):
        if "images_per_s" not in row:
            print(f"{row['name']:24s}{row['failure'] or 'not timed'}")
            continue
        ratios = "".join("        –" if row[key] is None else f"{row[key]:9.3f}" for key in RATIOS)
        figures = f"{row['images_per_s']:8.0f}{row['ms_per_step']:10.2f}{row['spread']:8.3f}{row['cold_s']:9.1f}"
        print(f"{row['name']:24s}{figures} {ratios}")
    known = {row["name"]: row for row in rows}
    for line in verdicts(known):
        print(line)


RATIOS = ("of_bare", "of_compiled", "of_graphs")


def verdicts(rows: dict[str, Answer]) -> list[str]:
    """What is promised against what was found."""
    found: list[tuple[str, float | None, str, bool]] = []
    for name, references, least in BARS:
        value = ratio(rows, name, references)
        against = "the fastest bare loop" if len(references) > 1 else references[0]
        found.append((f"{name} / {against}", value, f"at least {least}", value is not None and value >= least))
    for name, fewest in RATES:
        rate = rows.get(name, {}).get("images_per_s")
        found.append((f"{name}, images/s", rate, f"at least {fewest}", rate is not None and rate >= fewest))
    for name, longest in STARTS:
        cold = rows.get(name, {}).get("cold_s")
        found.append((f"{name}, cold start in s", cold, f"at most {longest}", cold is not None and cold <= longest))
    return [
        f"{'holds' if holds else 'FAILS':8s}{what:44s}{value:10.3f}   {bar}"
        for what, value, bar, holds in found
        if value is not None
    ]


# One contestant, in its own process.


def compete(name: str, options: argparse.Namespace) -> None:
    part_name, way = split_name(name)
    part = (TINY if options.tiny else PARTS)[part_name]
    if "ours" in way:
        train_ours(part, way, options)
        return
    play = bare_loop(part, way, options)
    first = timed(play)
    timed(play)
    say({"first_s": first, "compiling": compiling()})
    for _ in sys.stdin:
        say({"seconds": timed(play), "images": part.steps * part.batch, "gib": memory()})


def say(answer: Answer) -> None:
    print(f"#{json.dumps(answer)}", flush=True)


def timed(play: Callable[[], None]) -> float:
    begun = time.perf_counter()
    play()
    synchronise()
    return time.perf_counter() - begun


def synchronise() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def memory() -> float | None:
    """GiB that tensors have taken at most."""
    import torch

    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.max_memory_allocated() / 2**30)


def compiling() -> dict[str, float]:
    """Seconds of the compiler so far, by phase."""
    from torch._dynamo.utils import calculate_time_spent

    return {phase: round(seconds, 2) for phase, seconds in calculate_time_spent().items()}


# Loops around upstream timm, written plainly.


def bare_loop(part: Part, way: str, options: argparse.Namespace) -> Callable[[], None]:
    """An epoch: batches by index from bytes on the device, normalised; loss, backward, AdamW."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = make_model(part, way).to(device).train()
    forward = compiled(model, way, tiny=options.tiny)
    images, labels = device_images(part, options, device)
    mean = torch.full((1, 3, 1, 1), 0.5, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=device.type == "cuda")
    loss_of = {"natural": natural_loss, "pgd": pgd_loss}[part.task]

    def ask(pixels: Any) -> Any:
        return forward((pixels - mean) / mean)

    def play() -> None:
        order = torch.randperm(len(images), device=device)
        for rows in order.split(part.batch)[: part.steps]:
            torch.compiler.cudagraph_mark_step_begin()
            x = images[rows].float() / 255
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, ask, x, labels[rows], part)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return play


def make_model(part: Part, way: str) -> Any:
    """timm's module itself; robust attention by our surgery."""
    import vitruvius
    from vitruvius.models import create_model

    model = create_model(part.model, num_classes=part.classes).model
    if way.startswith("rpc"):
        vitruvius.rewire(model, f"rpc:iterations={way[3]}")
    return model


def compiled(model: Any, way: str, *, tiny: bool) -> Any:
    import torch

    if tiny or way.endswith("bare"):
        return model
    mode = "reduce-overhead" if way.endswith("graphs") else None
    return torch.compile(model, mode=mode)


def device_images(part: Part, options: argparse.Namespace, device: Any) -> tuple[Any, Any]:
    """Bytes (N, 3, H, W) and labels (N,) on the device."""
    import numpy as np
    import torch

    number = part.steps * part.batch
    if part.cifar and options.data is not None:
        with np.load(options.data) as arrays:
            images = torch.from_numpy(arrays["x_train"][:number]).movedim(-1, 1).contiguous()
            labels = torch.from_numpy(arrays["y_train"][:number].astype(np.int64))
        return images.to(device), labels.to(device)
    shape = (number, 3, part.size, part.size)
    images = torch.randint(256, shape, dtype=torch.uint8, device=device)
    return images, torch.arange(number, device=device) % part.classes


def natural_loss(model: Any, ask: Any, x: Any, y: Any, part: Part) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(ask(x), y)


def pgd_loss(model: Any, ask: Any, x: Any, y: Any, part: Part) -> Any:
    """Cross-entropy at x', found by PGD from a random start on the model in eval mode."""
    import torch
    from torch.nn import functional as F

    model.eval().requires_grad_(False)
    moved = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp(0, 1)
    for _ in range(part.attack_steps):
        moved.requires_grad_()
        loss = F.cross_entropy(ask(moved), y, reduction="sum")
        (slope,) = torch.autograd.grad(loss, moved)
        moved = moved.detach() + EPS / 2 * slope.sign()
        moved = torch.minimum(torch.maximum(moved, x - EPS), x + EPS).clamp(0, 1)
    model.train().requires_grad_(True)
    return F.cross_entropy(ask(moved), y)


# Our own loop.


def train_ours(part: Part, way: str, options: argparse.Namespace) -> None:
    """`vitruvius train` as a user runs it; after every epoch it waits for its turn."""
    from vitruvius.training import train

    train(recipe(part, way, options), quiet=True, callbacks=[Turns(part, options.folder)])


class Turns:
    """Ready after two epochs; then an epoch for every line that comes."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self.folder = folder

    def epoch_end(self, epoch: int, model: object) -> None:
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        if epoch == 0:
            return
        if epoch == 1:
            say({"first_s": rows[0]["seconds"], "compiling": compiling()})
        else:
            say({"seconds": rows[-1]["seconds"], "images": self.part.steps * self.part.batch, "gib": memory()})
        if not sys.stdin.readline():
            os._exit(0)


def recipe(part: Part, way: str, options: argparse.Namespace) -> dict[str, Any]:
    number = part.steps * part.batch
    data: dict[str, Any] = {
        "dataset": "fake", "num_classes": part.classes, "batch_size": part.batch, "workers": 0, "smoothing": 0.0,
        "train_num_samples": number, "val_num_samples": part.batch, "cache": "auto",
    }  # fmt: skip
    if part.cifar and options.data is not None:
        data |= {"dataset": "npz", "root": str(options.data), "val_split": "test"}
    if part.cifar:
        data |= {"pad": 4, "hflip": 0.5}
    if "randaugment" in way:
        data |= {"pad": None, "scale": [0.8, 1.0], "ratio": [0.9, 1.1], "aa": "rand-m9-mstd0.5-inc1"}
    train: dict[str, Any] = {
        "epochs": 10_000, "precision": "bf16", "holdout": 0, "select": "clean", "alarm": "none", "lr": 1e-4,
        "evaluate_every": 10_000, "compile": "auto",
    }  # fmt: skip
    if "eager" in way:
        train["compile"] = False
    if "fp32" in way:
        train["precision"] = "fp32"
    model = {"name": part.model, "kwargs": {"drop_path_rate": part.drop_path}}
    made = {"model": model, "data": data, "train": train, "task": task_of(part)}
    if way.startswith("rpc"):
        made["attention"] = [{"parts": [f"rpc:iterations={way[3]}"]}]
    return {**made, "out": str(options.folder)}


def task_of(part: Part) -> str | dict[str, Any]:
    if part.task == "natural":
        return "supervised"
    use = {"pgd": "adversarial", "trades": "trades"}[part.task]
    return {"use": use, "eps": EPS, "attack": {"use": "pgd", "steps": part.attack_steps}}


if __name__ == "__main__":
    main()
