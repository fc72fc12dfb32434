"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

B images in a batch, K classes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius.evaluation._names import Threat, describe, name_threats
from vitruvius.evaluation.ledger import Columns, Ledger
from vitruvius.evaluation.result import Report, summarise

Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, height, width) in [0, 1], labels (B), ids (B)


@runtime_checkable
class NumberedLoader(Protocol):
    """A loader that knows which image of the data set each one is."""

    def with_ids(self) -> Iterator[Batch]: ...


class Progress(Protocol):
    """Told after every batch how many images are done and how accurate the model was on them."""

    def __call__(self, done: int, total: int | None, /, **numbers: float) -> None: ...


def clean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The identity threat: images as they are."""
    return x


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    threats: Sequence[Threat] = (),
    *,
    folder: str | Path | None = None,
    process: Process | None = None,
    progress: Progress | None = None,
    signature: dict[str, object] | None = None,
) -> Report:
    """Accuracy on images as they are and under each threat, image by image.

    With a `folder`, the ledger is written there as it grows and an interrupted evaluation goes on
    where it stopped. Under torchrun each process takes its share and every image counts once.
    """
    if model.training:
        raise ConfigError(
            "the model is in train mode, where dropout and batch statistics blur the result; call .eval()."
        )
    process = process or Process(device=next(model.parameters()).device)
    named = name_threats([clean, *threats])
    specs = {name: describe(threat) for name, threat in named.items()}
    ledger = Ledger(folder, rank=process.rank)
    notes = {"data": str(getattr(loader, "name", "unnamed")), "threats": list(specs.values()), **(signature or {})}
    ledger.start(notes)
    total, done = getattr(loader, "num_images", None), 0
    for x, y, ids in numbered(loader):
        x, y = x.to(process.device), y.to(process.device)
        check_batch(x, y, ids)
        for name, threat in named.items():
            _judge(model, name, threat, x, y, ids, ledger)
        done += len(y)
        if progress is not None:
            progress(done, total, accuracy=_running_accuracy(ledger, list(named)[-1]))
    ledger.join(process.gather(ledger.columns)[: process.world_size] if process.world_size > 1 else [])
    if not ledger.columns or not len(ledger.done("clean")):
        raise DataError(f"the loader {notes['data']!r} yielded no images; nothing to evaluate.")
    eps = {name: getattr(threat, "eps", None) for name, threat in named.items()}
    report = summarise(ledger, specs, eps, str(notes["data"]), [])
    if ledger.folder is not None and process.first:
        ledger.save(ledger.folder / "ledger.safetensors", notes)
        report.save(ledger.folder / "report.json")
    process.wait()
    return report


def numbered(loader: Iterable[Any]) -> Iterator[Batch]:
    """Batches with ids: the loader's own, else counted in order of arrival."""
    if isinstance(loader, NumberedLoader):
        yield from loader.with_ids()
        return
    start = 0
    for x, y, *rest in loader:
        ids = rest[0] if rest else torch.arange(start, start + len(y))
        start += len(y)
        yield x, y, ids


def check_batch(x: Tensor, y: Tensor, ids: Tensor) -> None:
    """Pixels must be finite and in [0, 1], labels whole numbers: anything else would falsify the result."""
    if not x.is_floating_point() or not torch.isfinite(x).all():
        raise DataError(f"images {ids[:3].tolist()} … hold {x.dtype} with non-finite values; expected finite pixels.")
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        raise DataError(
            f"pixels reach from {low:.3g} to {high:.3g}, expected [0, 1]. "
            "Give images as they are: the model normalises by itself (PixelModel)."
        )
    if y.dim() != 1 or y.is_floating_point():
        raise DataError(f"labels have shape {tuple(y.shape)} and dtype {y.dtype}, expected one whole number an image.")


def _judge(model: nn.Module, name: str, threat: Threat, x: Tensor, y: Tensor, ids: Tensor, ledger: Ledger) -> None:
    """Run one threat on the images it has not seen, and write down what the model answers."""
    new = ~torch.isin(ids, ledger.done(name))
    if not new.any():
        return
    keep = new.to(x.device)
    x, y, ids = x[keep], y[keep], ids[new]
    begun = time.perf_counter()
    moved = threat(model, x, y, ids=ids) if _takes_ids(threat) else threat(model, x, y)  # type: ignore[call-arg]
    rows = answer(model, moved, y)
    elapsed = (time.perf_counter() - begun) / len(y)
    ledger.add(name, {"id": ids, "label": y, "seconds": torch.full_like(rows["loss"], elapsed), **rows})


@torch.no_grad()
def answer(model: nn.Module, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch; `top5`: whether the label is among its five best guesses."""
    logits = model(x).float()  # (B, K)
    if not torch.isfinite(logits).all():
        raise DataError(
            f"the model answered {tuple(logits.shape)} logits that are not finite; its weights may be damaged."
        )
    if int(y.max()) >= logits.shape[1] or int(y.min()) < 0:
        raise DataError(
            f"labels reach from {int(y.min())} to {int(y.max())}, the model knows classes 0 … {logits.shape[1] - 1}."
        )
    confidence, prediction = logits.softmax(-1).max(-1)
    top = logits.topk(min(5, logits.shape[1])).indices
    return {
        "prediction": prediction.int(),
        "confidence": confidence,
        "correct": prediction == y,
        "loss": F.cross_entropy(logits, y, reduction="none"),
        "top5": (top == y[:, None]).any(-1),
    }


def _takes_ids(threat: Threat) -> bool:
    return "ids" in inspect.signature(threat).parameters


def _running_accuracy(ledger: Ledger, name: str) -> float:
    return float(ledger.columns[name]["correct"].float().mean())
