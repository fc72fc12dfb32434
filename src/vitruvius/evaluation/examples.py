"""Adversarial examples as data sets: made once, kept losslessly, evaluated again by any model.

`images`: x'. `perturbations`: (x' − x + ε) / 2ε, the perturbation stretched to [0, 1], to see whether another model
recognises the class in it (Debenedetti et al. 2023, arXiv:2209.07399; their pictures have the opposite sign).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError
from vitruvius._files import append_line, atomic_write_bytes, claim_folder, read_text, save_tensors, sweep
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius.evaluation.base import answer, check_judged, numbered, subject_of
from vitruvius.evaluation.threats import Threat, describe, moved_by

What = Literal["images", "perturbations"]
Row = dict[str, int]  # id, right, right_8bit
RECORD = "examples.json"  # what the pictures are of, and the names of all classes, also of those without a picture
ROWS = "examples.jsonl"  # a line for every batch that is drawn, so that an interrupted command goes on
PARTS = ".parts"  # where pictures are written before they are moved to their class


@dataclass(frozen=True, kw_only=True)
class ExampleScores:
    """How often the model that examples were made for is still right."""

    accuracy: float
    accuracy_8bit: float  # after rounding to whole grey levels, as pictures are stored
    spec: str
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class ExampleSet(ExampleScores):
    """Adversarial examples, and how often the model they were made for is still right."""

    images: Tensor  # (n, C, height, width) in [0, 1]
    labels: Tensor  # (n,)
    ids: Tensor  # (n,)


def make_examples(
    model: nn.Module,
    loader: Iterable[Any],
    threat: Threat,
    *,
    what: What = "images",
    progress: Progress = no_progress,
) -> ExampleSet:
    """Attack every image once.

    model: in eval mode. loader: batches (images, labels) or with ids too. threat: a function (model, x, y) → x'.
    what: keep x', or the perturbation stretched to [0, 1].
    progress: called after every batch with the images done, how many there are, and the accuracy so far.
    """
    attacks = _Attacks(model, loader, threat, what, progress)
    batches: list[tuple[Tensor, ...]] = []
    for x, y, ids in numbered(loader):
        kept, rows = attacks.attack(x, y, ids)
        batches.append((kept, y.cpu(), ids.cpu()))
        attacks.count(rows)
    images, labels, ids = (torch.cat(column) for column in zip(*batches, strict=True))
    scores = attacks.scores(num_classes=max(_known_classes(model), int(labels.max()) + 1))
    return ExampleSet(images=images, labels=labels, ids=ids, **scores)


def draw_examples(
    model: nn.Module,
    loader: Iterable[Any],
    threat: Threat,
    folder: str | Path,
    *,
    what: What = "images",
    progress: Progress = no_progress,
) -> ExampleScores:
    """Attack every image that has no picture in a folder yet, and write one of each; memory holds a batch at a time.

    folder: of the pictures, which may hold some already; they are `validation/CLASS/ID.png`, as the data source
        `folder` reads them. model, loader, threat, what, progress: as for `make_examples`.
    """
    attacks = _Attacks(model, loader, threat, what, progress)
    folder, num_classes = Path(folder), _known_classes(model)
    classes = [f"{number:0{len(str(num_classes - 1))}d}" for number in range(num_classes)]  # 000 … 999
    subject = {**subject_of(model, loader), "spec": describe(threat), "what": what, "classes": classes}
    claim_folder(folder, RECORD, subject, "pictures")
    sweep(folder / PARTS)
    drawn = _read_rows(folder / ROWS)
    for x, y, ids in numbered(loader):
        rows = [drawn[number] for number in ids.tolist() if number in drawn]
        if len(rows) < len(ids):  # also of a batch that was interrupted all images: the same ones are attacked together
            images, rows = attacks.attack(x, y, ids)
            for image, label, number in zip(images, y.tolist(), ids.tolist(), strict=True):
                file = folder / "validation" / classes[label] / f"{number:08d}.png"
                atomic_write_bytes(file, _png(image), tmp_dir=folder / PARTS)
            append_line(folder / ROWS, json.dumps(rows))
        attacks.count(rows)
    with contextlib.suppress(OSError):
        (folder / PARTS).rmdir()
    return ExampleScores(**attacks.scores(num_classes=num_classes))


def save_examples(examples: ExampleSet, path: str | Path) -> Path:
    """A file `*.safetensors`, lossless, which `dataset: tensors` reads."""
    tensors = {"images": examples.images, "labels": examples.labels, "ids": examples.ids}
    notes = {name: str(getattr(examples, name)) for name in ("spec", "accuracy", "accuracy_8bit", "num_classes")}
    save_tensors(path, tensors, notes)
    return Path(path)


def check_what(threat: Threat, what: What) -> None:
    """Refuse to stretch perturbations by a radius that is not finite."""
    eps = float(getattr(threat, "eps", None) or 0.0)
    if what == "perturbations" and not 0 < eps < math.inf:
        raise ConfigError(f"{describe(threat)} has no finite eps to stretch perturbations by; keep images instead.")


class _Attacks:
    """A threat on one batch after the other, and how often the model is right so far."""

    def __init__(self, model: nn.Module, loader: Iterable[Any], threat: Threat, what: What, progress: Progress) -> None:
        check_judged(model)
        check_what(threat, what)
        self.model, self.threat, self.what, self.progress = model, threat, what, progress
        self.total = getattr(loader, "num_images", None)
        self.done = self.right = self.right_8bit = 0

    def attack(self, x: Tensor, y: Tensor, ids: Tensor) -> tuple[Tensor, list[Row]]:
        """What is kept of a batch, (B, C, height, width) on the CPU, and whether the model is right about each x'."""
        device = device_of(self.model)
        x, y = x.to(device), y.to(device)
        after = None if self.total is None else self.total - self.done - len(y)
        so_far = [describe(self.threat), *([self._in_words()] if self.done else [])]
        progress = scaled(part_of(self.progress, self.done, after, " ".join(so_far)), len(y))
        moved = moved_by(self.threat, self.model, x, y, ids, progress)
        kept = moved
        if self.what == "perturbations":
            eps = float(self.threat.eps)  # type: ignore[attr-defined]
            kept = (moved - x + eps) / (2 * eps)
        right, right_8bit = (answer(self.model, m, y)["correct"].int() for m in (moved, (moved * 255).round() / 255))
        columns = zip(ids.tolist(), right.tolist(), right_8bit.tolist(), strict=True)
        return kept.clamp(0, 1).cpu(), [{"id": a, "right": b, "right_8bit": c} for a, b, c in columns]

    def count(self, rows: Sequence[Row]) -> None:
        """The images of these rows are done."""
        self.done += len(rows)
        self.right += sum(row["right"] for row in rows)
        self.right_8bit += sum(row["right_8bit"] for row in rows)
        self.progress(self.done, self.total, self._in_words())

    def scores(self, *, num_classes: int) -> dict[str, Any]:
        """The fields of `ExampleScores`."""
        done = max(self.done, 1)
        shares = {"accuracy": self.right / done, "accuracy_8bit": self.right_8bit / done}
        return {**shares, "spec": describe(self.threat), "num_classes": num_classes}

    def _in_words(self) -> str:
        return f"{100 * self.right / max(self.done, 1):.1f} % still right"


def _known_classes(model: nn.Module) -> int:
    return int(getattr(model, "num_classes", 0))


def _read_rows(file: Path) -> dict[int, Row]:
    """The rows of pictures that are there, by their ids."""
    rows: dict[int, Row] = {}
    for line in read_text(file).splitlines() if file.exists() else []:
        try:
            rows |= {row["id"]: row for row in json.loads(line)}
        except ValueError:  # cut off by a kill: its images are attacked again
            break
    return rows


def _png(image: Tensor) -> bytes:
    pixels = (image * 255).round().byte().movedim(0, -1).numpy()
    buffer = BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "png")
    return buffer.getvalue()
