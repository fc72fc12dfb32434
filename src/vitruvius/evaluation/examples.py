"""Adversarial examples as data sets: made once, kept losslessly, evaluated again by any model.

`images`: x'. `perturbations`: (x' − x + ε) / 2ε, the perturbation stretched to [0, 1], to see whether another model
recognises the class in it (Debenedetti et al. 2023, arXiv:2209.07399; their pictures have the opposite sign).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from vitruvius._bar import Bar
from vitruvius._checks import Progress, device_of
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_bytes, ensure_writable, save_tensors
from vitruvius._processes import choose_device
from vitruvius.data import eval_loader
from vitruvius.evaluation._evaluate import numbered
from vitruvius.evaluation._judging import answer
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.targets import check_head, check_numbering, limit_images, load_target_plugins, open_target

What = Literal["images", "perturbations"]


@dataclass(frozen=True, kw_only=True)
class ExampleSet:
    """Adversarial examples, and how often the model they were made for is still right."""

    images: Tensor  # (n, C, height, width) in [0, 1]
    labels: Tensor  # (n,)
    ids: Tensor  # (n,)
    accuracy: float
    accuracy_8bit: float  # after rounding to whole grey levels, as pictures are stored
    spec: str
    num_classes: int


def attack_target(
    target: str,
    overrides: Sequence[str],
    threat: str,
    out: str,
    *,
    what: What = "images",
    images: int | None = None,
) -> tuple[ExampleSet, Path]:
    """Attack the images of whatever names a model, and keep the result as a data set.

    target: a run folder, a model's name, or another kind of target.
    overrides: settings of the target, `data.root=…`.
    threat: `pgd:eps=4/255,steps=10`.
    out: a file `*.safetensors` (lossless), or a folder of 8-bit pictures.
    what: the attacked images, or their perturbations stretched to [0, 1].
    images: how many, a fixed random choice; default all.
    """
    load_target_plugins(target, overrides)
    made = make_threat(threat, where="--threat")
    opened = open_target(target, [*overrides, *limit_images(images)])
    check_head(opened)
    device = choose_device(opened.config.device)
    opened.model.to(device).eval()
    loader = eval_loader(opened.config.data, input_size=opened.model.data_config, device=device)
    check_numbering(opened, loader)
    with Bar("attacking") as bar:
        examples = make_examples(opened.model, loader, made, what=what, progress=bar)
    return examples, save_examples(examples, out)


def make_examples(
    model: nn.Module,
    loader: Iterable[Any],
    threat: Threat,
    *,
    what: What = "images",
    progress: Progress | None = None,
) -> ExampleSet:
    """Attack every image once.

    model: in eval mode. loader: batches (images, labels) or with ids too. threat: a function (model, x, y) → x'.
    what: keep x', or the perturbation stretched to [0, 1].
    progress: called after every batch with the images done, how many there are, and the accuracy so far.
    """
    eps = float(getattr(threat, "eps", 0.0))
    if what == "perturbations" and not eps:
        raise ConfigError(f"{describe(threat)} has no eps to stretch perturbations by; keep images instead.")
    device = device_of(model)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    right = right_8bit = classes = done = 0
    for x, y, ids in numbered(loader):
        x, y = x.to(device), y.to(device)
        moved = threat(model, x, y, ids=ids)  # type: ignore[call-arg]
        right += int(answer(model, moved, y)["correct"].sum())
        right_8bit += int(answer(model, (moved * 255).round() / 255, y)["correct"].sum())
        if what == "images":
            kept = moved
        else:
            kept = (moved - x + eps) / (2 * eps)
        rows.append((kept.clamp(0, 1).cpu(), y.cpu(), ids.cpu()))
        done += len(y)
        if progress is not None:
            progress(done, getattr(loader, "num_images", None), words=f"{100 * right / done:.1f} % still right")
        classes = int(getattr(model, "num_classes", 0)) or classes
    images, labels, numbers = (torch.cat(column) for column in zip(*rows, strict=True))
    return ExampleSet(
        images=images,
        labels=labels,
        ids=numbers,
        accuracy=right / len(labels),
        accuracy_8bit=right_8bit / len(labels),
        spec=describe(threat),
        num_classes=max(classes, int(labels.max()) + 1),
    )


def save_examples(examples: ExampleSet, out: str | Path) -> Path:
    """A file `*.safetensors` (lossless, read by `dataset: tensors`), else a folder of 8-bit PNGs (`folder`)."""
    path = Path(out)
    if path.suffix == ".safetensors":
        tensors = {"images": examples.images, "labels": examples.labels, "ids": examples.ids}
        notes = {name: str(getattr(examples, name)) for name in ("spec", "accuracy", "accuracy_8bit", "num_classes")}
        save_tensors(path, tensors, notes)
        return path
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; choose another folder, or a file that ends in .safetensors.")
    width = len(str(examples.num_classes - 1))
    for image, label, number in zip(examples.images, examples.labels.tolist(), examples.ids.tolist(), strict=True):
        folder = Path(ensure_writable(path / "validation" / f"{label:0{width}d}"))
        atomic_write_bytes(folder / f"{number:08d}.png", _png(image))
    return path


def _png(image: Tensor) -> bytes:
    pixels = (image * 255).round().byte().movedim(0, -1).numpy()
    buffer = BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "png")
    return buffer.getvalue()
