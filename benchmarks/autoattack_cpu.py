"""Standard AutoAttack on a CPU, in both precisions, against the original (pyautoattack), image by image.

    python -m benchmarks autoattack_cpu [--images 40] [--ways exact fast] [--out FILE.json]
    python -m benchmarks autoattack_cpu --models runs/mine,data.root=cifar10.npz --radii linf=8/255 l2=0.5

All run four stages with their published numbers of iterations and queries, on one thread, one after the other on the
same weights and images. Seconds are those of the processor. A model is `cnn` or `vit`, the digits classifiers of the
golden files, or whatever names a model on the command line, with its settings after commas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius.attacks import AutoAttack
from vitruvius.request import open_request

ROOT = Path(__file__).parents[1]
RADII = {  # some at which half of the images break, and some at which nearly all stand
    "cnn": ("linf=0.15", "l2=1", "linf=0.05", "l2=0.3"),
    "vit": ("linf=0.1", "l2=0.75", "linf=0.03", "l2=0.25"),
}
Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(RADII))
    parser.add_argument("--radii", nargs="+", help="such as linf=8/255 l2=0.5; by default those of cnn and vit")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--ways", nargs="+", default=["exact", "fast"], choices=["exact", "fast", "auto"])
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = ["original", *options.ways]
    heads = [f"{way}: s, robust" if way == "original" else f"{way}: s, ×, robust, differ" for way in ways]
    print("| model | threat | images | " + " | ".join(heads) + " |\n" + "|---" * (len(ways) + 3) + "|", flush=True)
    rows = []
    for name in options.models:
        model, x, y = load(name, options.images)
        for radius in options.radii or RADII.get(name, ("linf=8/255", "l2=0.5")):
            norm, _, eps = radius.partition("=")
            row = measure(model, x, y, norm, float(Fraction(eps)), options.ways)
            rows.append({"model": name, "threat": radius, "images": len(x), **row})
            print(
                f"| {name} | {norm} {eps} | {len(x)} | " + " | ".join(cell(row, way) for way in ways) + " |", flush=True
            )
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))


def measure(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float, ways: list[str]) -> dict[str, Any]:
    """Seconds and robust images of the original and of each way of ours; None for an original that is not installed."""
    theirs = original(norm, eps, len(x))
    found = {"original": theirs and attacked(theirs, model, x, y)}
    for way in ways:
        found[way] = attacked(AutoAttack(eps=eps, norm=norm, precision=way), model, x, y)
    return found


def attacked(attack: Attack, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs are about their own code
        moved = attack(model, x, y)
    seconds = time.process_time() - begun
    with torch.no_grad():
        return {"seconds": seconds, "robust": (model(moved).argmax(1) == y).tolist()}


def cell(row: dict[str, Any], way: str) -> str:
    """`differ`: images that ours breaks and the original does not, and the other way round."""
    mine, theirs = row[way], row["original"]
    if mine is None:
        return "–"
    shown = f"{mine['seconds']:.1f}, {sum(mine['robust'])}"
    if way == "original":
        return shown
    if theirs is None:
        return f"{mine['seconds']:.1f}, –, {sum(mine['robust'])}, –"
    pairs = list(zip(mine["robust"], theirs["robust"], strict=True))
    only = [sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)]
    times = theirs["seconds"] / mine["seconds"]
    return f"{mine['seconds']:.1f}, {times:.2f}, {sum(mine['robust'])}, {only[0]} + {only[1]}"


def original(norm: str, eps: float, batch_size: int) -> Attack | None:
    """The published AutoAttack; None where it is not installed."""
    try:
        import pyautoattack
    except ImportError:
        return None

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = pyautoattack.AutoAttack(model, norm={"linf": "Linf"}.get(norm, norm.upper()), eps=eps, seed=0)
        found = made.run_standard_evaluation(x, y, batch_size=batch_size)
        moved: Tensor = found[0] if isinstance(found, tuple) else found
        return moved

    return attack


def load(name: str, images: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in eval mode, and the first images with their labels."""
    if name in RADII:
        sys.path.insert(0, str(ROOT / "scripts"))
        from autoattack_strength import load as load_golden

        problem: Any = load_golden(ROOT / "tests" / "golden", name, "cpu")
        return problem.model, problem.x[:images], problem.y[:images]
    target, *settings = name.split(",")
    with open_request(target, settings, images=images) as request:
        x, y = (torch.cat(parts) for parts in zip(*request.loader, strict=True))
        return request.model.cpu(), x.cpu(), y.cpu()


if __name__ == "__main__":
    main()
