"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

B images in a batch, K classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_eval_mode, device_of
from vitruvius._errors import DataError
from vitruvius._processes import Process
from vitruvius._registry import Spec
from vitruvius.attacks import Ensemble, check_inputs
from vitruvius.evaluation._judging import judge
from vitruvius.evaluation._subject import subject_of
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.result import Report, summarise
from vitruvius.evaluation.shift_report import corruption_report
from vitruvius.evaluation.threats import Threat, by_spec, enter, make_threats

ALONE = Process(device=torch.device("cpu"))
Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, height, width) in [0, 1], labels (B), ids (B)


@runtime_checkable
class NumberedLoader(Protocol):
    """A loader that knows which image of the data set each one is."""

    def with_ids(self) -> Iterator[Batch]: ...


def clean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The identity threat: images as they are."""
    return x


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    threats: Spec | Sequence[Spec | Threat] = (),
    *,
    folder: str | Path | None = None,
    process: Process | None = None,
    progress: Progress | None = None,
    signature: Mapping[str, object] | None = None,
) -> Report:
    """Accuracy on images as they are and under each threat, image by image.

    model: in eval mode; takes pixels in [0, 1] and returns logits (B, K).
    loader: batches (images, labels), or (images, labels, ids).
    threats: each `"pgd:eps=8/255"`, `{use: pgd, eps: 8/255}`, or a function (model, x, y) → x'.
    folder: where the ledger is written as it grows: an interrupted evaluation goes on where it stopped, and threats
        asked for later join those that are done. Default: nothing is written.
    process: of several processes, this one; each brings its share of the images.
    progress: called after every batch with the images done, how many there are, and a few words.
    signature: facts about the data that make an evaluation in the same folder another one.
    """
    check_eval_mode(model)
    process = process or Process(device=device_of(model))
    chosen = by_spec([clean, *_make_all(threats)])
    ledger = Ledger(folder, rank=process.rank)
    subject: dict[str, object] = {}
    if folder is not None:
        subject = {**subject_of(model, loader), **(signature or {})}
    entries = process.on_first(lambda: ledger.claim(subject, [enter(threat) for threat in chosen.values()]))
    ledger.read()
    _judge_all(model, numbered(loader, process), chosen, ledger, process, _watched(loader, process, progress))
    ledger.join(process.gather(ledger.columns) if process.world_size > 1 else [])
    data = str(getattr(loader, "name", "unnamed"))
    if not len(ledger.done("clean")):
        raise DataError(f"the loader {data!r} yielded no images; nothing to evaluate.")
    broken = {name for names in process.gather(list(getattr(loader, "broken", ()))) for name in names}
    report = summarise(ledger, entries, data, broken=sorted(broken))
    if folder is not None:
        process.on_first(lambda: _keep(ledger, report, Path(folder)))
    return report


def _make_all(threats: Spec | Sequence[Spec | Threat]) -> list[Threat]:
    """The threats that their descriptions mean; one alone may be given as it is."""
    if isinstance(threats, str | Mapping):
        threats = [threats]
    return [threat for spec in threats for threat in make_threats(spec, where="threats")]


def numbered(loader: Iterable[Any], process: Process = ALONE) -> Iterator[Batch]:
    """Batches with ids: the loader's own, else counted in order of arrival, every process for itself."""
    if isinstance(loader, NumberedLoader):
        yield from loader.with_ids()
        return
    start = 0
    for x, y, *rest in loader:
        if rest:
            ids = rest[0]
        else:
            ids = torch.arange(start, start + len(y)) * process.world_size + process.rank
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
    ensembles = _ensembles(threats)
    size = max((ensemble.pool_batches for ensemble in ensembles.values()), default=1)
    last = list(threats)[-1]
    for pool in _batched(batches, size):
        checked = [_checked(batch, process) for batch in pool]
        for spec, threat in threats.items():
            for x, y, ids in [_joined(checked)] if spec in ensembles else checked:
                judge(model, spec, threat, x, y, ids, ledger, len(checked[0][1]))
        watch(sum(len(y) for _, y, _ in checked), float(ledger.columns[last]["correct"].float().mean()))


def _ensembles(threats: Mapping[str, object]) -> dict[str, Ensemble]:
    """Those that are given several batches at once."""
    return {spec: threat for spec, threat in threats.items() if isinstance(threat, Ensemble)}


def _checked(batch: Batch, process: Process) -> Batch:
    x, y, ids = batch
    x, y, ids = x.to(process.device), y.to(process.device), ids.cpu()
    if y.ndim != 1:
        raise DataError(f"labels have shape {tuple(y.shape)}, expected one whole number per image.")
    check_inputs(x, y)
    return x, y, ids


def _joined(batches: Sequence[Batch]) -> Batch:
    x, y, ids = (torch.cat(column) for column in zip(*batches, strict=True))
    return x, y, ids


def _batched(batches: Iterable[Batch], size: int) -> Iterator[tuple[Batch, ...]]:
    """itertools.batched, which Python 3.11 lacks."""
    source = iter(batches)
    while pool := tuple(itertools.islice(source, size)):
        yield pool


def _keep(ledger: Ledger, report: Report, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")
    if (found := corruption_report(report)) is not None:
        found.save(folder / "shifts" / found.name / "report.json")


def _watched(loader: Any, process: Process, progress: Progress | None) -> Callable[[int, float], None]:
    """Counts images for the one who watches."""
    number, done = getattr(loader, "num_images", None), 0
    total = None
    if number is not None:
        total = len(range(process.rank, number, process.world_size))

    def watch(images: int, accuracy: float) -> None:
        nonlocal done
        done += images
        if progress is not None:
            progress(done, total, words=f"under the last threat {100 * accuracy:.1f} %")

    return watch
