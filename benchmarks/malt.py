"""Targets by logits or by gradients: AutoAttack's apgd-t against apgd-malt on a classifier of 1,000 classes.

    python -m benchmarks malt --weights tf_efficientnet_lite0.fp16.safetensors --images val.tar --results malt.jsonl
    python -m benchmarks malt --tiny                    a CPU: does everything run?

`--weights` are of timm's tf_efficientnet_lite0; `--images` is a tar of JPEGs in folders named by WordNet ids, such as
Imagenette's at 224 pixels. Batch by batch: APGD-CE, then what it leaves is searched with 9 targets of the largest
logits (apgd-t), and with 1, 3 and 9 targets nearest by the gradient (MALT; gradients of 100 candidates). Every way sees
the same images. After every batch a line says for each radius and way: the seconds and the gradients of the targeted
stage, the images that stay robust, and those that only one of apgd-t and this way breaks. No batch begins once
`--seconds` are over, so the last lines are complete.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from vitruvius._processes import choose_device
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.apgd_malt import APGDMalt
from vitruvius.attacks.apgd_targeted import APGDTargeted

NAME = "tf_efficientnet_lite0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", type=Path, help="safetensors of timm's tf_efficientnet_lite0")
    add("--images", type=Path, help="a tar of JPEGs in folders named by WordNet ids")
    add("--count", type=int, default=200, help="images, those that the model gets right; 200 by default")
    add("--eps", type=float, nargs="+", default=[0.125, 0.25, 0.5], help="radii in 1/255")
    add("--steps", type=int, default=100, help="of Auto-PGD; 100 by default")
    add("--candidates", type=int, default=100, help="wrong classes whose gradients are taken; 100 by default")
    add("--batch", type=int, default=100, help="images at once")
    add("--seconds", type=float, default=480.0, help="begin no batch after this many seconds; 480 by default")
    add("--results", type=Path, help="write every row here as it comes, a JSON object per line")
    add("--tiny", action="store_true", help="a small untrained model and random images")
    options = parser.parse_args()
    model, x, y = problem(options)
    model = Counted(model)
    print(f"{len(x)} images, torch {torch.__version__}, {x.device}", flush=True)
    deadline = time.perf_counter() + options.seconds
    tally: dict[tuple[float, str], Row] = {}
    for begin in range(0, len(x), options.batch):
        if time.perf_counter() > deadline:
            print(f"the time is over: {begin} of {len(x)} images were searched", flush=True)
            break
        part = slice(begin, begin + options.batch)
        for radius in options.eps:
            for name, found in search(model, x[part], y[part], radius / 255, options):
                row = tally.setdefault((radius, name), Row(radius, name))
                row.add(found)
                note(options, row)
    print_table(list(tally.values()))


@dataclass
class Found:
    """What one way did to a batch."""

    images: int
    left: int  # by APGD-CE
    seconds: float
    gradients: int
    robust: Tensor  # (L,) of those left
    robust_apgd_t: Tensor


@dataclass
class Row:
    """What one way has done at one radius so far."""

    eps: float  # in 1/255
    way: str
    images: int = 0
    after_apgd_ce: int = 0
    robust: int = 0
    seconds: float = 0.0
    gradients: int = 0  # images × backward passes of the targeted stage
    only_this_breaks: int = 0  # and not apgd-t
    only_apgd_t_breaks: int = 0

    def add(self, found: Found) -> None:
        self.images += found.images
        self.after_apgd_ce += found.left
        self.robust += int(found.robust.sum())
        self.seconds += found.seconds
        self.gradients += found.gradients
        self.only_this_breaks += int((found.robust_apgd_t & ~found.robust).sum())
        self.only_apgd_t_breaks += int((found.robust & ~found.robust_apgd_t).sum())


class Counted(nn.Module):
    """A model that counts the images whose gradient is taken."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.gradients = 0
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        if logits.requires_grad:
            logits.register_hook(self._count)
        return logits

    def _count(self, grad: Tensor) -> None:
        self.gradients += len(grad)


def search(
    model: Counted, x: Tensor, y: Tensor, eps: float, options: argparse.Namespace
) -> Iterator[tuple[str, Found]]:
    """APGD-CE once, then every choice of targets on the images that it leaves."""
    settings: dict[str, Any] = {"eps": eps, "steps": options.steps, "batch_size": options.batch}
    left = is_right(model, APGD(**settings)(model, x, y), y)
    x_left, y_left = x[left], y[left]
    ways: dict[str, Any] = {"apgd-t, targets=9": APGDTargeted(targets=9, **settings)}
    settings["candidates"] = options.candidates
    ways |= {f"apgd-malt, targets={number}": APGDMalt(targets=number, **settings) for number in (1, 3, 9)}
    expected = torch.zeros_like(y_left, dtype=torch.bool)
    for number, (name, attack) in enumerate(ways.items()):
        model.gradients, begun = 0, seconds_now()
        robust = torch.ones_like(expected)
        if len(x_left):
            robust = is_right(model, attack(model, x_left, y_left), y_left)
        if number == 0:
            expected = robust
        yield name, Found(len(x), len(x_left), seconds_now() - begun, model.gradients, robust, expected)


@torch.no_grad()
def is_right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([model(part).argmax(1) for part in x.split(50)]) == y


def seconds_now() -> float:
    """Once the device is done; of the processor where it is the device, so that others on it do not count."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def note(options: argparse.Namespace, row: Row) -> None:
    line = json.dumps(asdict(row))
    print(line, flush=True)
    if options.results is not None:
        with options.results.open("a") as file:
            file.write(f"{line}\n")


def print_table(rows: list[Row]) -> None:
    names = ["eps · 255", "targeted stage", "images", "robust after APGD-CE", "robust after it", "only it breaks"]
    names += ["only apgd-t breaks", "seconds", "gradients"]
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in sorted(rows, key=lambda row: row.eps):
        cells = [
            row.eps, row.way, row.images, row.after_apgd_ce, row.robust, row.only_this_breaks, row.only_apgd_t_breaks,
            f"{row.seconds:.1f}", row.gradients,
        ]  # fmt: skip
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def problem(options: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """A model on its device, and images that it gets right with their labels."""
    if options.tiny:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=20, img_size=32, patch_size=8).eval()
        x = torch.rand(options.count, 3, 32, 32)
        with torch.no_grad():
            return model, x, model(x).argmax(1)
    if options.weights is None or options.images is None:
        raise SystemExit("--weights and --images are needed, or --tiny.")
    model = Normalised(load(options.weights)).to(choose_device()).eval()
    return model, *pictures(options.images, options.count, model)


class Normalised(nn.Module):
    """Pixels in [0, 1] → logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - 0.5) / 0.5)
        return logits


def load(weights: Path) -> nn.Module:
    model: nn.Module = timm.create_model(NAME)
    model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model


@torch.no_grad()
def pictures(file: Path, count: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first images of every class in turn that the model gets right, (B, 3, 224, 224), and their labels."""
    numbers = {name: number for number, name in enumerate(timm.data.ImageNetInfo().label_names())}
    with tarfile.open(file) as archive:
        names = [member.name for member in archive.getmembers() if member.name.lower().endswith((".jpg", ".jpeg"))]
        by_class: dict[str, list[str]] = {}
        for name in sorted(names):
            by_class.setdefault(Path(name).parent.name, []).append(name)
        turns = [name for group in zip(*by_class.values(), strict=False) for name in group][: 2 * count]
        pixels = torch.stack([read(archive, name) for name in turns])
    labels = torch.tensor([numbers[Path(name).parent.name] for name in turns])
    device = next(model.parameters()).device
    pixels, labels = pixels.to(device), labels.to(device)
    right = torch.cat([model(part).argmax(1) for part in pixels.split(50)]) == labels
    return pixels[right][:count], labels[right][:count]


def read(archive: tarfile.TarFile, name: str) -> Tensor:
    member = archive.extractfile(name)
    assert member is not None
    with Image.open(io.BytesIO(member.read())) as image:
        square = image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).movedim(-1, 0) / 255


if __name__ == "__main__":
    main()
