"""evaluate_shift: a model on the images of a published set, part by part → a report; the ledger is that of `evaluate`.

B images in a batch, K classes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode, check_labels, check_logits, device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress
from vitruvius.data import DataConfig, images_loader
from vitruvius.data.base import InputSize
from vitruvius.data.identity import identify
from vitruvius.data.loader import Loader
from vitruvius.data.preprocessing import resolve
from vitruvius.evaluation.base import Columns, as_floats, data_settings, read_logits, subject_of
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics import Baseline, alexnet
from vitruvius.evaluation.shift_report import ShiftReport, summarise_shift
from vitruvius.evaluation.threats import Entry
from vitruvius.shifts.base import Images, Remark, Shift, Subset, open_shift, say_once

LOOKED_AT = 512  # files of a part whose sizes are compared: there may be a hundred parts
UNRELATED = ("data.root", "data.val_split", "data.class_map")  # of the data a run was trained on


@dataclass(frozen=True, kw_only=True)
class _Examiner:
    """Who asks the model, and where the answers go."""

    model: nn.Module
    shift: Shift
    data: DataConfig
    input_size: Any
    temperature: float | None
    ledger: Ledger
    process: Process
    progress: Progress


def evaluate_shift(
    model: nn.Module,
    shift: Shift | str,
    *,
    data: DataConfig | None = None,
    input_size: Any = None,
    folder: str | Path | None = None,
    process: Process | None = None,
    progress: Progress = no_progress,
    temperature: float | None = None,
    baseline: Baseline | None = None,
    clean_error: float | None = None,
) -> ShiftReport:
    """Accuracy, calibration, and what else a published set is made for, of every part that is there.

    model: in eval mode; takes pixels in [0, 1] and returns logits (B, K).
    shift: `imagenet-c:/path`, or what `open_shift` makes of it.
    data: how images are read (batch_size, workers, crop_pct …); default: `DataConfig()`.
    input_size: how they are prepared, (channels, height, width); default: as the model itself says.
    folder: where the ledger is kept; an interrupted evaluation goes on there. Default: nothing is written.
    process: of several processes, this one.
    progress: called after every batch with the images done, how many there are, and a few words.
    temperature: adds confidences at that temperature.
    baseline: what mCE is against; default: AlexNet for imagenet-c, else none.
    clean_error: of the model, 0 … 1; relative mCE needs it.
    """
    if isinstance(shift, str):
        shift = open_shift(shift)
    process = process or Process(device=device_of(model))
    ledger = Ledger(folder, rank=process.rank)
    examiner = _Examiner(
        model=model,
        shift=shift,
        data=data or DataConfig(),
        input_size=input_size or getattr(model, "data_config", None),
        temperature=temperature,
        ledger=ledger,
        process=process,
        progress=progress,
    )
    _check(model, shift, examiner.input_size)
    if baseline is None and shift.name == "imagenet-c":
        baseline = alexnet()
    try:
        _begin(examiner)
        remarks = [*shift.remarks, *_judge_all(examiner)]
        report = summarise_shift(ledger, shift, remarks, baseline, clean_error, temperature)
        if folder is not None:
            process.on_first(lambda: _keep(ledger, report, Path(folder)))
    finally:
        ledger.release()
    return report


def _judge_all(who: _Examiner) -> list[str]:
    """Every part in turn, then the rows of all processes together; what was remarkable, each remark once."""
    own: list[Remark | str] = []
    for part in who.shift.parts:
        own += _judge(who, part)
    if who.process.world_size > 1:
        who.ledger.join(who.process.gather(who.ledger.columns))
    every = itertools.chain.from_iterable(who.process.gather(own))
    return say_once(who.shift.name, len(who.shift.parts), every)


def _begin(who: _Examiner) -> None:
    """Claim the ledger and read what it holds, on every process before any of them writes."""
    ledger = who.ledger
    subject: dict[str, Any] = {}
    if ledger.folder is not None:
        subject = _subject(who.model, who.shift, who.data, who.input_size, who.temperature)
    who.process.on_first(lambda: ledger.claim(subject, [_enter(part) for part in who.shift.parts]))
    ledger.read()
    who.process.gather(None)  # all must agree on what is left


def _check(model: nn.Module, shift: Shift, size: Any) -> None:
    check_eval_mode(model)
    if size is None:
        raise ConfigError("the model does not say what images it takes; give input_size=(channels, height, width).")
    check_fit(model, shift)


def check_fit(model: nn.Module, shift: Shift) -> None:
    """Refuse a model that says that it knows other classes than the set has.

    `model` is asked for its number of classes, `shift` for its own.
    """
    if known := getattr(model, "num_classes", None):
        _check_classes(int(known), shift)


def _check_classes(known: int, shift: Shift) -> None:
    if known != shift.num_classes:
        names = ", ".join([*shift.classes[:12], *(["…"] if len(shift.classes) > 12 else [])])
        named = ""
        if names:
            named = f" ({names})"
        raise DataError(
            f"{shift.name} needs a model that knows its {shift.num_classes} classes{named} in their order; this one "
            f"answers with {known}. {'Correct the class folders, or choose' if named else 'Choose'} a model of these "
            "classes."
        )


def _subject(model: nn.Module, shift: Shift, data: DataConfig, size: Any, temperature: float | None) -> dict[str, Any]:
    about = {key: value for key, value in subject_of(model, None).items() if key not in ("data", "images")}
    settings = {key: value for key, value in data_settings(data).items() if key not in UNRELATED}
    prepared = {"preprocessing": str(resolve(data, size))}
    if temperature is not None:
        settings["temperature"] = temperature
    return {"data": shift.name, **about, **settings, **prepared}


def _enter(part: Subset) -> Entry:
    return Entry(spec=part.name, short=part.group, severity=part.severity)


def _judge(who: _Examiner, part: Subset) -> Sequence[Remark | str]:
    """Every image of a part that the ledger lacks; what was remarkable about the part."""
    images = part.open()
    ids = chosen(images, who.data.val_num_samples)
    who.process.on_first(lambda: who.ledger.check_part(part.name, identify(images, ids, looked_at=LOOKED_AT)))
    ids = ids[who.ledger.lacks(part.name, images.keys[ids])]
    if not len(ids):
        return images.remarks
    loader = shift_loader(images, ids, who.data, who.input_size, who.process, cropped=who.shift.cropped)
    mine, done = len(range(who.process.rank, len(ids), who.process.world_size)), 0
    begun = time.perf_counter()
    for x, y, numbers in loader.with_ids():
        rows = respond(who, x.to(who.process.device), y.to(who.process.device))
        seconds = torch.full((len(y),), (time.perf_counter() - begun) / len(y))
        who.ledger.add(part.name, {"id": images.keys[numbers.cpu()], "label": y, **rows, "seconds": seconds})
        done, begun = done + len(y), time.perf_counter()
        who.progress(done, mine, f"batch {100 * float(rows['correct'].float().mean()):.1f} %")
    broken = [f"{part.name}: {len(loader.broken)} image(s) could not be read: {', '.join(loader.broken[:3])}."]
    return [*images.remarks, *(broken if loader.broken else [])]


@torch.no_grad()
def respond(who: _Examiner, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch; where the set has a subset of the classes, only their logits count.

    `who` holds the model and what counts of its answers; `x` (B, C, H, W) in [0, 1]; `y` (B,) labels.
    """
    logits = as_floats(who.model(x))  # (B, K)
    if logits.ndim == 2:
        _check_classes(logits.shape[1], who.shift)
    if who.shift.columns is not None:
        logits = logits[:, list(who.shift.columns)]
    check_logits(logits, len(y))
    check_labels(y, logits.shape[1])
    rows = read_logits(logits, y)
    if who.temperature is not None:
        rows["tempered"] = (logits / who.temperature).softmax(-1).amax(-1)
    return rows


def _keep(ledger: Ledger, report: ShiftReport, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")


def shift_loader(
    images: Images, ids: Tensor, config: DataConfig, input_size: InputSize, process: Process, *, cropped: bool
) -> Loader:
    """The images `ids`, each once, dealt out to the processes.

    images: those of one part.
    ids: (n,) numbers of those wanted.
    config: the data section: batch size, workers, and what overrules the model.
    input_size: timm's data config of the model, or (channels, height, width).
    process: this one of several.
    cropped: whether images are at the crop already, so that they are resized only.
    """
    if cropped and config.crop_pct is None:
        config = dataclasses.replace(config, crop_pct=1.0)
    return images_loader(
        images,
        config,
        input_size=input_size,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        only=ids,
    )


def chosen(images: Images, limit: int | None) -> Tensor:
    """Ids of all images, or of as many as wanted: those with the smallest keys, so the same files in every part.

    `images` are those of one part; `limit` is how many, None for all.
    """
    if limit is None or limit >= len(images):
        return torch.arange(len(images))
    return images.keys.argsort(stable=True)[:limit].sort().values
