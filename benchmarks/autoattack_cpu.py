"""Standard AutoAttack through `evaluate` on a CPU, in both precisions, against the original, image by image.

    python -m benchmarks autoattack_cpu [--images 20 200] [--ways original exact auto] [--out FILE.json]
    python -m benchmarks autoattack_cpu --models zoo/vit_cifar10_robust,data.root=cifar10.npz --radii linf=8/255 l2=0.5
    python -m benchmarks autoattack_cpu --models "dim 192, 6 blocks, 32 px" --radii linf=0.3/255 --images 20

All run four stages with their published numbers of iterations and queries, on one thread, one after the other on the
same weights and images; ours in batches of 128, a loader's default. Seconds are those of the processor. The original is
pyautoattack. A model is `cnn` or `vit`, the digits classifiers of the golden files; one of the random ViTs of `python
-m benchmarks cpu` or a CIFAR-10 model of the zoo, whose labels are its own answers to smooth random pictures; or
whatever names a model on the command line, with its settings after commas, `data.root` among them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitruvius
from vitruvius.attacks import AutoAttack
from vitruvius.data import DataConfig, eval_loader
from vitruvius.request import open_request

ROOT = Path(__file__).parents[1]
BATCH = 128  # of a loader
RADII = {  # some at which half of the images break, and some at which nearly all stand
    "cnn": ("linf=0.15", "l2=1", "linf=0.05", "l2=0.3"),
    "vit": ("linf=0.1", "l2=0.75", "linf=0.03", "l2=0.25"),
}
OWN_ANSWERS = ("zoo/vit_cifar10_natural", "zoo/vit_cifar10_robust", "zoo/vit_cifar10_rpc")  # where no data are named
Robust = list[bool]


def vit(dim: int, depth: int, heads: int, *, size: int = 32, patch: int = 4, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    made = timm.models.VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=dim, depth=depth, num_heads=heads, num_classes=classes
    )
    with torch.no_grad():
        made.head.weight.mul_(20)  # margins that do not vanish in bfloat16
    return made.eval().requires_grad_(False)


VITS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # the model, the size of its images, images in a batch
    "dim 96, 4 blocks, 32 px": (functools.partial(vit, 96, 4, 3), 32, 64),
    "dim 192, 6 blocks, 32 px": (functools.partial(vit, 192, 6, 3), 32, 32),
    "DeiT-Tiny, 224 px": (functools.partial(vit, 192, 12, 3, size=224, patch=16, classes=1000), 224, 4),
    "DeiT-Small, 224 px": (functools.partial(vit, 384, 12, 6, size=224, patch=16, classes=1000), 224, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(RADII))
    parser.add_argument("--radii", nargs="+", help="such as linf=8/255 l2=0.5; by default those of cnn and vit")
    parser.add_argument("--images", type=int, nargs="+", default=[20, 200], help="a row for each number")
    ways = ["original", "exact", "fast", "auto"]
    parser.add_argument("--ways", nargs="+", default=["original", "exact", "auto"], choices=ways)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = [f"{way}: s, robust" if way == "original" else f"{way}: s, ×, robust, differ" for way in options.ways]
    print("| model | threat | images | " + " | ".join(heads) + " |\n" + "|---" * (len(heads) + 3) + "|", flush=True)
    rows = []
    for name in options.models:
        model, x, y = load(name, max(options.images))
        for radius in options.radii or RADII.get(name, ("linf=8/255", "l2=0.5")):
            norm, _, eps = radius.partition("=")
            for images in options.images:
                row = measure(model, x[:images], y[:images], norm, float(Fraction(eps)), options.ways)
                rows.append({"model": name, "threat": radius, "images": images, **row})
                cells = " | ".join(cell(row, way) for way in options.ways)
                print(f"| {name} | {norm} {eps} | {images} | {cells} |", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(rows, indent=1))


def measure(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float, ways: list[str]) -> dict[str, Any]:
    """Seconds and robust images of the original and of each way of ours; None for an original that is not installed."""
    with torch.no_grad():
        model(x[:BATCH])  # what a first pass prepares is nobody's
    found = {}
    for way in ways:
        attack = original(norm, eps) if way == "original" else AutoAttack(eps=eps, norm=norm, precision=way)
        found[way] = attack and timed(attack, model, x, y)
    return found


def timed(attack: Any, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Through `evaluate` if it is ours."""
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs are about their own code
        robust = attacked(model, x, y, attack) if isinstance(attack, AutoAttack) else attack(model, x, y)
    return {"seconds": time.process_time() - begun, "robust": robust}


def attacked(model: nn.Module, x: Tensor, y: Tensor, attack: Any, batch: int = BATCH) -> Robust:
    """Which images are robust, by what `evaluate` finds in batches of a loader."""
    report = vitruvius.evaluate(model, list(zip(x.split(batch), y.split(batch), strict=True)), attack)
    rows = report.ledger.rows(report.threats[-1].spec)
    robust: Robust = rows["correct"][rows["id"].argsort()].tolist()
    return robust


def cell(row: dict[str, Any], way: str) -> str:
    """`differ`: images that ours breaks and the original does not, and the other way round, by their numbers."""
    mine, theirs = row[way], row.get("original")
    if mine is None:
        return "–"
    shown = [f"{mine['seconds']:.1f}", f"{sum(mine['robust'])}"]
    if way != "original" and theirs is not None:
        shown.insert(1, f"{theirs['seconds'] / mine['seconds']:.2f}")
        pairs = list(enumerate(zip(mine["robust"], theirs["robust"], strict=True)))
        ours, others = ([n for n, pair in pairs if pair == only] for only in ((False, True), (True, False)))
        shown.append(f"{len(ours)} + {len(others)}" + (f" ({ours} + {others})" if ours or others else ""))
    return ", ".join(shown)


def original(norm: str, eps: float, effort: dict[str, int] | None = None) -> Callable[..., Robust] | None:
    """The published AutoAttack on all images at once, or one of less effort; None where it is not installed."""
    try:
        import pyautoattack
    except ImportError:
        return None

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Robust:
        made = pyautoattack.AutoAttack(model, norm={"linf": "Linf"}.get(norm, norm.upper()), eps=eps, seed=0)
        if effort is not None:
            for stage in (made.apgd, made.apgd_targeted, made.fab):
                stage.n_iter = effort["steps"]
            made.apgd_targeted.n_target_classes = made.fab.n_target_classes = effort["targets"]
            made.square.n_queries = effort["queries"]
        found = made.run_standard_evaluation(x, y, batch_size=len(x))
        moved: Tensor = found[0] if isinstance(found, tuple) else found
        with torch.no_grad():
            robust: Robust = (model(moved).argmax(1) == y).tolist()
        return robust

    return attack


def load(name: str, images: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in eval mode, and the first images with their labels."""
    if name in RADII:
        sys.path.insert(0, str(ROOT / "scripts"))
        from autoattack_strength import load as load_golden

        problem: Any = load_golden(ROOT / "tests" / "golden", name, "cpu")
        x, y = problem.x, problem.y
        if images > len(x):  # more digits that it was not trained on
            digits = eval_loader(DataConfig(dataset="digits"), input_size=(3, 8, 8), split="validation")
            x, y = (torch.cat(parts) for parts in zip(*digits, strict=True))
        return problem.model, x[:images], y[:images]
    if name in VITS or name in OWN_ANSWERS:
        model = VITS[name][0]() if name in VITS else vitruvius.load_model(name).eval()
        x = smooth(images, VITS[name][1] if name in VITS else 32)
        with torch.no_grad():
            return model, x, torch.cat([model(part).argmax(1) for part in x.split(BATCH)])
    target, *settings = name.split(",")
    with open_request(target, settings, images=images) as request:
        x, y = (torch.cat(parts) for parts in zip(*request.loader, strict=True))
        return request.model.cpu().requires_grad_(False), x.cpu(), y.cpu()


def smooth(images: int, size: int) -> Tensor:
    """Random pictures without noise."""
    coarse = torch.rand(images, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


if __name__ == "__main__":
    main()
