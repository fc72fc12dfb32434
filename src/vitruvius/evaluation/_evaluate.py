"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

B images in a batch, K classes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius.attacks import check_inputs
from vitruvius.evaluation._names import Threat, by_spec, enter
from vitruvius.evaluation._subject import subject_of
from vitruvius.evaluation.ledger import Columns, Ledger
from vitruvius.evaluation.result import Report, summarise

ALONE = Process(device=torch.device("cpu"))
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
    signature: Mapping[str, object] | None = None,
) -> Report:
    """Accuracy on images as they are and under each threat, image by image.

    With a `folder`, the ledger is written there as it grows: an interrupted evaluation goes on where it
    stopped, and threats asked for later join those that are done. `signature` adds to what makes an evaluation
    another one. With several processes, each gives its share of the images and its `process`.
    """
    if any(module.training for module in model.modules()):
        raise ConfigError(
            "the model is in train mode, where dropout and batch statistics blur the result; call model.eval()."
        )
    process = process or Process(device=_device(model))
    chosen = by_spec([clean, *threats])
    ledger = Ledger(folder, rank=process.rank)
    subject = {} if folder is None else {**subject_of(model, loader), **(signature or {})}
    entries = process.once(lambda: ledger.claim(subject, [enter(threat) for threat in chosen.values()]))
    ledger.read()
    _judge_all(model, numbered(loader, process), chosen, ledger, process, _watched(loader, process, progress))
    ledger.join(process.gather(ledger.columns) if process.world_size > 1 else [])
    data = str(getattr(loader, "name", "unnamed"))
    if not len(ledger.done("clean")):
        raise DataError(f"the loader {data!r} yielded no images; nothing to evaluate.")
    report = summarise(ledger, entries, data)
    if folder is not None:
        process.once(lambda: _keep(ledger, report, Path(folder)))
    return report


def numbered(loader: Iterable[Any], process: Process = ALONE) -> Iterator[Batch]:
    """Batches with ids: the loader's own, else counted in order of arrival, every process for itself."""
    if isinstance(loader, NumberedLoader):
        yield from loader.with_ids()
        return
    start = 0
    for x, y, *rest in loader:
        ids = rest[0] if rest else torch.arange(start, start + len(y)) * process.world_size + process.rank
        start += len(y)
        yield x, y, ids


def _judge_all(
    model: nn.Module,
    batches: Iterable[Batch],
    threats: Mapping[str, Threat],
    ledger: Ledger,
    process: Process,
    watch: Callable[[int, float], None],
) -> None:
    for x, y, ids in batches:
        x, y, ids = x.to(process.device), y.to(process.device), ids.cpu()
        if y.ndim != 1:
            raise DataError(f"labels have shape {tuple(y.shape)}, expected one whole number an image.")
        check_inputs(x, y)
        for spec, threat in threats.items():
            _judge(model, spec, threat, x, y, ids, ledger)
        watch(len(y), float(ledger.columns[spec]["correct"].float().mean()))


def _judge(model: nn.Module, spec: str, threat: Threat, x: Tensor, y: Tensor, ids: Tensor, ledger: Ledger) -> None:
    """Run one threat on the images it has not seen, and write down what the model answers."""
    new = ~torch.isin(ids, ledger.done(spec))
    if not new.any():
        return
    keep = new.to(x.device)
    x, y, ids = x[keep], y[keep], ids[new]
    begun = time.perf_counter()
    moved = threat(model, x, y, ids=ids) if _takes_ids(threat) else threat(model, x, y)  # type: ignore[call-arg]
    rows = answer(model, moved, y)
    elapsed = (time.perf_counter() - begun) / len(y)
    ledger.add(spec, {"id": ids, "label": y, "seconds": torch.full_like(rows["loss"], elapsed), **rows})


@torch.no_grad()
def answer(model: nn.Module, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch; `top5`: whether the label is among its five best guesses."""
    logits = model(x).float()  # (B, K)
    if logits.shape[:-1] != y.shape:
        raise ConfigError(f"the model answered {tuple(logits.shape)}, expected logits ({len(y)}, classes).")
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


def _keep(ledger: Ledger, report: Report, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")


def _takes_ids(threat: Threat) -> bool:
    return "ids" in inspect.signature(threat).parameters


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _watched(loader: Any, process: Process, progress: Progress | None) -> Callable[[int, float], None]:
    """Counts images for the one who watches."""
    number, done = getattr(loader, "num_images", None), 0
    total = None if number is None else len(range(process.rank, number, process.world_size))

    def watch(images: int, accuracy: float) -> None:
        nonlocal done
        done += images
        if progress is not None:
            progress(done, total, accuracy=accuracy)

    return watch
