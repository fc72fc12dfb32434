"""Targets by logits or by gradients: AutoAttack's apgd-t against apgd-malt on a classifier of 1,000 classes.

    python -m benchmarks malt --weights tf_efficientnet_lite0.fp16.safetensors --images val.tar --results malt.jsonl

`--weights` are of timm's tf_efficientnet_lite0; `--images` is a tar of JPEGs in folders named by WordNet ids, such as
Imagenette's at 224 pixels. After APGD-CE the images that are left are searched with 9 targets of the largest logits
(apgd-t), or with 1, 3 and 9 targets nearest by the gradient (MALT; gradients of 100 candidates). For every radius: the
seconds of the targeted stage, and the images that stay robust.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from vitruvius._processes import choose_device
from vitruvius.attacks.apgd_malt import APGDMalt
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.autoattack import AutoAttack

NAME = "tf_efficientnet_lite0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="safetensors of timm's tf_efficientnet_lite0")
    add("--images", type=Path, required=True, help="a tar of JPEGs in folders named by WordNet ids")
    add("--count", type=int, default=200, help="images, those that the model gets right; 200 by default")
    add("--eps", type=float, nargs="+", default=[0.125, 0.25, 0.5], help="radii in 1/255")
    add("--steps", type=int, default=100, help="of Auto-PGD; 100 by default")
    add("--candidates", type=int, default=100, help="wrong classes whose gradients are taken; 100 by default")
    add("--batch", type=int, default=100, help="images at once")
    add("--results", type=Path, help="write every row here as it comes, a JSON object per line")
    options = parser.parse_args()
    model = Normalised(load(options.weights)).to(choose_device()).eval()
    x, y = pictures(options.images, options.count, model)
    print(f"{NAME}, {len(x)} images, torch {torch.__version__}, {x.device}", flush=True)
    print(
        "| eps · 255 | targeted stage | seconds | robust after APGD-CE | robust after it |\n|---|---|---|---|---|",
        flush=True,
    )
    for radius in options.eps:
        for row in measure(model, x, y, radius / 255, options):
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")


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


def measure(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for every choice of targets."""
    settings: dict[str, Any] = {"eps": eps, "steps": options.steps, "batch_size": options.batch}
    ways: dict[str, Any] = {"apgd-t, 9 targets": APGDTargeted(targets=9, **settings)}
    settings["candidates"] = options.candidates
    ways |= {f"apgd-malt, {number} targets": APGDMalt(targets=number, **settings) for number in (1, 3, 9)}
    for name, attack in ways.items():
        ensemble = AutoAttack(eps=eps, version="custom", attacks=("apgd-ce", attack), batch_size=options.batch)
        outcome = ensemble.run(model, x, y)
        _, first, second = outcome.stages
        left = len(x) - outcome.stages[0].broken - first.broken
        yield {
            "eps": round(255 * eps, 4), "stage": name, "seconds": round(second.seconds, 2),
            "robust_before": left, "robust": left - second.broken,
        }  # fmt: skip


if __name__ == "__main__":
    main()
