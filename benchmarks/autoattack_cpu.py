"""How fast is our standard AutoAttack on a CPU against the original (pyautoattack), on the digits classifiers?

    python benchmarks/autoattack_cpu.py [--golden DIR] [--images 60] [--out FILE.json]

Both run all four stages with their published numbers of iterations and queries, in one process on one thread, one
after the other on the same weights and images. Seconds are those of the processor. DIR as in
scripts/autoattack_strength.py; the default is the reduced copy of the tests, 60 of the 200 images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius.attacks.adapters import FromAutoAttack
from vitruvius.attacks.autoattack import AutoAttack

ROOT = Path(__file__).parents[1]
CASES = (
    ("cnn", "Linf", 0.15), ("cnn", "L2", 1.0), ("vit", "Linf", 0.1), ("vit", "L2", 0.75),
    ("cnn", "Linf", 0.05), ("cnn", "L2", 0.3), ("vit", "Linf", 0.03), ("vit", "L2", 0.25),  # nearly all images stand
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path, default=ROOT / "tests" / "golden")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | threat | original: s, robust | ours: s, robust | times |\n|---|---|---|---|---|", flush=True)
    for kind, norm, eps in CASES:
        model, x, y = load(options.golden, kind, options.images)
        theirs, ours = (timed(attack, model, x, y) for attack in (original(norm, eps), AutoAttack(eps=eps, norm=norm)))
        rows.append({"model": kind, "norm": norm, "eps": eps, "original": theirs, "ours": ours})
        cells = " | ".join(f"{seconds:.1f}, {robust} of {len(x)}" for seconds, robust in (theirs, ours))
        print(f"| {kind} | {norm} {eps:g} | {cells} | {theirs[0] / ours[0]:.2f} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    whole = [sum(row[who][0] for row in rows) for who in ("original", "ours")]
    print(f"\nin all {whole[0]:.0f} s against {whole[1]:.0f} s: {whole[0] / whole[1]:.2f} times")


def original(norm: str, eps: float) -> Callable[..., Tensor]:
    import pyautoattack

    return FromAutoAttack(make=lambda model: pyautoattack.AutoAttack(model, norm=norm, eps=eps, seed=0))


def timed(attack: Callable[..., Tensor], model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, int]:
    """Processor seconds, and images that are still robust."""
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs are about their own code
        moved = attack(model, x, y)
    seconds = time.process_time() - begun
    with torch.no_grad():
        return seconds, int((model(moved).argmax(1) == y).sum())


def load(folder: Path, kind: str, images: int) -> tuple[nn.Module, Tensor, Tensor]:
    sys.path.insert(0, str(ROOT / "scripts"))
    from autoattack_strength import load as problem_of

    problem: Any = problem_of(folder, kind, "cpu")
    return problem.model, problem.x[:images], problem.y[:images]


if __name__ == "__main__":
    main()
