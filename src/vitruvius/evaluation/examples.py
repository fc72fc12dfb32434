"""Adversarial examples as data sets: made once, kept losslessly, evaluated again by any model.

`images`: x'. `perturbations`: (x' − x + ε) / 2ε, the perturbation stretched to [0, 1], to see whether another model
recognises the class in it (Debenedetti et al. 2023, arXiv:2209.07399; their pictures have the opposite sign).
"""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError
from vitruvius._files import (
    Lock,
    append_line,
    atomic_write_bytes,
    atomic_write_text,
    ensure_writable,
    is_lock,
    read_json,
    read_text,
    save_tensors,
    sweep,
)
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._secrets import redact
from vitruvius.evaluation.base import answer, check_judged, numbered, subject_of
from vitruvius.evaluation.threats import Threat, describe, moved_by

What = Literal["images", "perturbations"]
Row = dict[str, int]  # id, right, right_8bit
RECORD = "examples.json"
ROWS = "examples.jsonl"
WORKSHOP = ".parts"  # where pictures are written before they are moved to their class
ELSEWHERE = "Choose another folder, or a file that ends in .safetensors."


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
    check_judged(model)
    check_what(threat, what)
    score = _Score(progress, getattr(loader, "num_images", None))
    batches: list[_Attacked] = []
    for x, y, ids in numbered(loader):
        batches.append(_attack(model, threat, x, y, ids, what, score))
        score.add(batches[-1].rows())
    labels = torch.cat([batch.labels for batch in batches])
    known = int(getattr(model, "num_classes", 0))
    return ExampleSet(
        images=torch.cat([batch.images for batch in batches]),
        labels=labels,
        ids=torch.cat([batch.ids for batch in batches]),
        spec=describe(threat),
        num_classes=max(known, int(labels.max()) + 1),
        **score.shares,
    )


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

    folder: of the pictures, which may hold some already. model, loader, threat, what, progress: as for `make_examples`.
    """
    check_judged(model)
    check_what(threat, what)
    pictures = PictureFolder(Path(folder), int(getattr(model, "num_classes", 0)))
    pictures.claim({**subject_of(model, loader), "spec": describe(threat), "what": what})
    score = _Score(progress, getattr(loader, "num_images", None))
    for x, y, ids in numbered(loader):
        rows = [pictures.rows[number] for number in ids.tolist() if number in pictures.rows]
        if len(rows) < len(ids):  # also of a batch that was interrupted all images: the same ones are attacked together
            batch = _attack(model, threat, x, y, ids, what, score)
            rows = batch.rows()
            pictures.write(batch)
        score.add(rows)
    return ExampleScores(spec=describe(threat), num_classes=pictures.num_classes, **score.shares)


def save_examples(examples: ExampleSet, out: str | Path) -> Path:
    """A file `*.safetensors` (lossless, read by `dataset: tensors`), else a folder of 8-bit PNGs (`folder`)."""
    path = Path(out)
    if path.suffix == ".safetensors":
        tensors = {"images": examples.images, "labels": examples.labels, "ids": examples.ids}
        notes = {name: str(getattr(examples, name)) for name in ("spec", "accuracy", "accuracy_8bit", "num_classes")}
        save_tensors(path, tensors, notes)
        return path
    with Lock(path):
        pictures = PictureFolder(path, examples.num_classes)
        pictures.claim({"spec": examples.spec, "set": uuid.uuid4().hex})  # never the same as what is there
        pictures.draw(examples.images, examples.labels, examples.ids)
    return path


class PictureFolder:
    """A folder of pictures `validation/CLASS/ID.png` that the data source `folder` reads.

    examples.json says what they are of, and names all classes, also those without a picture; examples.jsonl has a line
    for every batch that is drawn, so that an interrupted command goes on.
    """

    def __init__(self, folder: Path, num_classes: int) -> None:
        self.folder = folder
        self.num_classes = num_classes
        self.rows: dict[int, Row] = {}  # of the pictures that are there, by their ids

    def claim(self, subject: Mapping[str, Any]) -> None:
        """Make the folder ours: new, or begun for the same subject, whose rows are read."""
        subject = redact({**subject, "classes": self.class_names()})
        file = self.folder / RECORD
        if file.exists():
            known = read_json(file)
            differing = [key for key in {**known, **subject} if known.get(key) != subject.get(key)]
            if differing:
                raise ConfigError(
                    f"{self.folder} is not empty: it holds pictures of another {differing[0]}. {ELSEWHERE}"
                )
            self._read_rows()
        elif self.folder.exists() and any(
            not is_lock(path) and not (path.name.startswith(".") and path.suffix == ".tmp")  # left before its record
            for path in self.folder.iterdir()
        ):
            raise ConfigError(f"{self.folder} is not empty. {ELSEWHERE}")
        ensure_writable(self.folder)
        sweep(self.folder)
        sweep(self.folder / WORKSHOP)
        atomic_write_text(file, json.dumps(subject, indent=1) + "\n")

    def class_names(self) -> list[str]:
        """The folders of all classes in order: 000 … 999."""
        width = len(str(self.num_classes - 1))
        return [f"{number:0{width}d}" for number in range(self.num_classes)]

    def write(self, batch: _Attacked) -> None:
        """The pictures of a `batch`, then the line that says so."""
        self.draw(batch.images, batch.labels, batch.ids)
        append_line(self.folder / ROWS, json.dumps(batch.rows()))

    def draw(self, images: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Pixels `images` (n, C, height, width) in [0, 1] as pictures, by their `labels` (n,) and `ids` (n,)."""
        names = self.class_names()
        for image, label, number in zip(images, labels.tolist(), ids.tolist(), strict=True):
            file = self.folder / "validation" / names[label] / f"{number:08d}.png"
            atomic_write_bytes(file, _png(image), tmp_dir=self.folder / WORKSHOP)
        with contextlib.suppress(OSError):
            (self.folder / WORKSHOP).rmdir()

    def _read_rows(self) -> None:
        if not (self.folder / ROWS).exists():
            return
        for line in read_text(self.folder / ROWS).splitlines():
            try:
                self.rows |= {row["id"]: row for row in json.loads(line)}
            except ValueError:  # cut off by a kill: its images are attacked again
                break


class _Score:
    """How many examples the model is right about, so far."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self.progress = progress
        self.total = total
        self.done = self.right = self.right_8bit = 0

    def add(self, rows: Sequence[Row]) -> None:
        self.done += len(rows)
        self.right += sum(row["right"] for row in rows)
        self.right_8bit += sum(row["right_8bit"] for row in rows)
        self.progress(self.done, self.total, f"{100 * self.shares['accuracy']:.1f} % still right")

    def of_batch(self, images: int, name: str) -> Progress:
        """The progress of an attack on the next images."""
        after = None if self.total is None else self.total - self.done - images
        so_far = f"{name} {100 * self.shares['accuracy']:.1f} % still right" if self.done else name
        return scaled(part_of(self.progress, self.done, after, so_far), images)

    @property
    def shares(self) -> dict[str, float]:
        """How often the model is still right, also after rounding."""
        done = max(self.done, 1)
        return {"accuracy": self.right / done, "accuracy_8bit": self.right_8bit / done}


@dataclass(frozen=True, kw_only=True)
class _Attacked:
    """A batch after the attack, on the CPU."""

    images: Tensor  # (B, C, height, width), what is kept
    labels: Tensor  # (B,)
    ids: Tensor  # (B,)
    right: Tensor  # (B,) whether the model is right about x'
    right_8bit: Tensor  # (B,) and about x' rounded to grey levels

    def rows(self) -> list[Row]:
        columns = (self.ids.tolist(), self.right.tolist(), self.right_8bit.tolist())
        return [{"id": a, "right": int(b), "right_8bit": int(c)} for a, b, c in zip(*columns, strict=True)]


def _attack(
    model: nn.Module, threat: Threat, x: Tensor, y: Tensor, ids: Tensor, what: What, score: _Score
) -> _Attacked:
    device = device_of(model)
    x, y = x.to(device), y.to(device)
    moved = moved_by(threat, model, x, y, ids, score.of_batch(len(y), describe(threat)))
    kept = moved
    if what == "perturbations":
        eps = float(threat.eps)  # type: ignore[attr-defined]
        kept = (moved - x + eps) / (2 * eps)
    return _Attacked(
        images=kept.clamp(0, 1).cpu(),
        labels=y.cpu(),
        ids=ids.cpu(),
        right=answer(model, moved, y)["correct"].cpu(),
        right_8bit=answer(model, (moved * 255).round() / 255, y)["correct"].cpu(),
    )


def check_what(threat: Threat, what: What) -> None:
    """Refuse to stretch perturbations by a radius that is not finite."""
    eps = float(getattr(threat, "eps", None) or 0.0)
    if what == "perturbations" and not 0 < eps < math.inf:
        raise ConfigError(f"{describe(threat)} has no finite eps to stretch perturbations by; keep images instead.")


def _png(image: Tensor) -> bytes:
    pixels = (image * 255).round().byte().movedim(0, -1).numpy()
    buffer = BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "png")
    return buffer.getvalue()
