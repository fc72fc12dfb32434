"""Attention at step 0 under every init, against its target: the table and the figures of docs/init.md.

    python scripts/init_table.py --figures docs/figures            (--steps 1000 for a quick look)

ViT-Tiny with 2×2 patches on 32×32 images: a 16×16 grid, C = 192, H = 3, D = 64, twelve layers, sin-cos positions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitruvius.attention.base import attention_map
from vitruvius.init.impulse import Offset, draw_offsets, impulse_map, offset_of, quality
from vitruvius.surgery import record
from vitruvius.surgery.initialising import initialise, layers
from vitruvius.surgery.positions import use_sincos_positions

GRID, SEED = (16, 16), 0
CONTENT = (0.0, 0.1, 0.3, 0.577)  # std of what is added to the positions; 0.577 is about a default patch embedding


@dataclass(frozen=True)
class Row:
    """One line of the table: an init, its settings, and which offsets its heads should have."""

    name: str
    init: str
    settings: dict[str, Any] = field(default_factory=dict)
    kernel: int = 3
    offsets: str = "middle"  # or an order of `draw_offsets`
    shared: bool = False

    def targets(self) -> Iterator[Offset]:
        """One offset per head, layer by layer."""
        if self.offsets == "middle":
            while True:
                yield (0, 0)
        taps = draw_offsets(self.kernel, self.offsets, generator())
        if self.shared:
            taps = iter(list(islice(taps, 3)) * 12)
        yield from (offset_of(tap, self.kernel) for tap in taps)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def rows(steps: int) -> list[Row]:
    released = {"steps": steps, "tolerance": 0.0}
    made = [Row("timm", "timm"), Row("skip", "skip"), Row("mimetic", "mimetic")]
    for kernel in (3, 5):
        sizes: dict[str, Any] = {"kernel": kernel}
        made += [
            Row("impulse, optimised", "impulse_optimised", {**released, **sizes}, kernel, "random", shared=True),
            Row("impulse, content 0.1", "impulse", {"content": 0.1, **sizes}, kernel, "distinct"),
            Row("impulse, closed form", "impulse", sizes, kernel, "distinct"),
        ]
    return made


def make_model() -> VisionTransformer:
    torch.manual_seed(SEED)
    sizes = {"img_size": 32, "patch_size": 2, "embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 10}
    model = VisionTransformer(class_token=False, global_pool="avg", **sizes).eval()
    use_sincos_positions(model)
    return model


def maps(model: nn.Module, content: float) -> Iterator[Tensor]:
    """Attention of every head of every layer, (H, N, N), were each to see positions plus normal noise."""
    for layer in layers(model):
        assert layer.positions is not None
        noise = torch.randn(layer.positions.shape, generator=torch.Generator().manual_seed(1))
        x = F.layer_norm(layer.positions + content * noise, (192,))
        w = layer.weights
        q, k = x @ w.q.mT + w.q_bias[:, None], x @ w.k.mT + w.k_bias[:, None]  # type: ignore[index]
        yield (q @ k.mT / 8).softmax(-1)


def in_network(model: nn.Module) -> list[Tensor]:
    """The same, as the whole network really computes it on a smooth random image."""
    noise = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), record(model) as seen:
        model(F.interpolate(noise, size=32, mode="bicubic"))
    return [attention_map(heads)[0] for heads in seen.values()]


def measure(all_maps: list[Tensor], row: Row) -> Tensor:
    """Mean probability, hits and error over all heads: (3,)."""
    targets = row.targets()
    return torch.tensor([quality(a, GRID, next(targets)) for heads in all_maps for a in heads]).mean(0)


def line(row: Row, model: nn.Module, seconds: float) -> str:
    found = [measure(list(maps(model, content)), row) for content in CONTENT]
    inside = in_network(model)
    norm = torch.stack([w.q.norm(dim=(1, 2)) * w.k.norm(dim=(1, 2)) for w in (x.weights for x in layers(model))]).mean()
    cells = [row.name, row.kernel if row.offsets != "middle" else "1", f"{seconds:.2f}", f"{norm:.1f}"]
    cells += [f"{found[0][2]:.2e}", *(f"{f[0]:.3f} / {f[1]:.3f}" for f in found)]
    for block in (0, 11):
        targets = islice(row.targets(), 3 * block, 3 * block + 3)
        inner = torch.tensor([quality(a, GRID, t) for a, t in zip(inside[block], targets, strict=True)]).mean(0)
        cells.append(f"{inner[0]:.3f} / {inner[1]:.3f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(row: Row, model: nn.Module, path: Path) -> None:
    """Where the patch in the middle looks: target, positions alone, with content, in the network; per head."""
    panels: list[tuple[str, Callable[[int], Tensor]]] = []
    alone, noisy, network = next(iter(maps(model, 0.0))), next(iter(maps(model, 0.577))), in_network(model)[0]
    targets = list(islice(row.targets(), 3))
    panels.append(("target", lambda h: impulse_map(GRID, targets[h])))
    for title, found in (("positions alone", alone), ("plus content .577", noisy), ("in block 0", network)):
        panels.append((title, lambda h, found=found: found[h]))  # type: ignore[misc]
    figure, axes = plt.subplots(3, 4, figsize=(5.6, 4.4), layout="constrained")
    for h, (line_of_axes, target) in enumerate(zip(axes, targets, strict=True)):
        for axis, (title, found_of) in zip(line_of_axes, panels, strict=True):
            axis.imshow(found_of(h)[8 * 16 + 8].view(GRID).detach(), cmap="magma", vmin=0)
            axis.plot(8 + target[1], 8 + target[0], "s", mfc="none", mec="cyan", ms=7)
            axis.set(xticks=[], yticks=[])
            if h == 0:
                axis.set_title(title, fontsize=8)
        line_of_axes[0].set_ylabel(f"head {h} {target}", fontsize=8)
    kernel = f", kernel {row.kernel}" if row.offsets != "middle" else ""
    figure.suptitle(f"{row.name}{kernel}: attention of the middle patch, layer 0", fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of the released optimisation")
    parser.add_argument("--figures", type=Path, help="folder to draw into")
    options = parser.parse_args()
    contents = " | ".join(f"σ = {c}" for c in CONTENT)
    print(f"| init | kernel | seconds | ‖q‖·‖k‖ | MSE | {contents} | block 0 | block 11 |")
    print("|---" * (7 + len(CONTENT)) + "|")
    for row in rows(options.steps):
        model = initialise(make_model(), "skip", generator=generator())  # beneath all but timm
        began = time.process_time()
        initialise(model, row.init, generator=generator(), **row.settings)
        seconds = time.process_time() - began
        print(line(row, model, seconds), flush=True)
        if options.figures and row.name != "impulse, content 0.1":
            options.figures.mkdir(parents=True, exist_ok=True)
            name = f"{row.name} {row.kernel}" if row.offsets != "middle" else row.name
            draw(row, model, options.figures / f"init_{name.replace(',', '').replace(' ', '_')}.png")


if __name__ == "__main__":
    main()
