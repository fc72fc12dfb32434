"""evaluate_shift: a model on the images of a published set, part by part → a report; the ledger is that of `evaluate`.

B images in a batch, K classes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress
from vitruvius.data import DataConfig, eval_loader, images_loader
from vitruvius.data.base import InputSize, split_folder
from vitruvius.data.identity import identify
from vitruvius.data.loader import Loader
from vitruvius.data.loading import held_out
from vitruvius.data.preprocessing import resolve
from vitruvius.evaluation.base import Columns, check_judged, data_settings, logits_of, read_logits, subject_of
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics.corruption import Baseline, alexnet
from vitruvius.evaluation.metrics.temperature import collect_logits, fit_temperature
from vitruvius.evaluation.shift_report import ShiftReport, load_shift_report, reduce_entries
from vitruvius.evaluation.threats import Entry
from vitruvius.shifts.base import Images, Remark, Shift, Subset, open_shift, say_once
from vitruvius.targets.base import Target, local_run

LOOKED_AT = 512  # files of a part whose sizes are compared: there may be a hundred parts
HELD_OUT = "held-out"
PUBLISHED = {"alexnet": alexnet}  # tables that --baseline may name
UNRELATED = ("data.root", "data.val_split", "data.class_map")  # of the data a run was trained on


class _Examiner(NamedTuple):
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
    shift = open_shift(shift) if isinstance(shift, str) else shift
    process = process or Process(device=device_of(model))
    data, input_size = data or DataConfig(), input_size or getattr(model, "data_config", None)
    check_judged(model)
    if input_size is None:
        raise ConfigError("the model does not say what images it takes; give input_size=(channels, height, width).")
    check_fit(model, shift)
    if baseline is None and shift.name == "imagenet-c":
        baseline = alexnet()
    ledger = Ledger(folder, rank=process.rank)
    who = _Examiner(model, shift, data, input_size, temperature, ledger, process, progress)
    try:
        subject = {} if folder is None else _subject(who)
        entries = {part.name: Entry(spec=part.name, short=part.group, severity=part.severity) for part in shift.parts}
        process.on_first(lambda: ledger.claim(subject, list(entries.values())))
        ledger.read()
        process.gather(None)  # all must agree on what is left before any of them writes
        own = [remark for part in shift.parts for remark in _judge(who, part)]
        if process.world_size > 1:
            ledger.join(process.gather(ledger.columns))
        every = itertools.chain.from_iterable(process.gather(own))
        judged = [entry for name, entry in entries.items() if ledger.number(name)]
        if not judged:
            raise DataError(f"no image of {shift.name} could be read; nothing to report.")
        report = reduce_entries(
            ledger, judged, name=shift.name, benchmark=shift.benchmark, baseline=baseline, clean_error=clean_error,
            outside=[part.name for part in shift.parts if part.outside], drawn=shift.drawn, missing=list(shift.missing),
            remarks=[*shift.remarks, *say_once(shift.name, len(shift.parts), every)], temperature=temperature,
        )  # fmt: skip
        if folder is not None:
            process.on_first(ledger.save)
            process.on_first(lambda: report.save(Path(folder) / "report.json"))
    finally:
        ledger.release()
    return report


def check_fit(model: nn.Module, shift: Shift) -> None:
    """Refuse a model that says that it knows other classes than the set has."""
    if known := getattr(model, "num_classes", None):
        _check_classes(int(known), shift)


def _check_classes(known: int, shift: Shift) -> None:
    if known != shift.num_classes:
        names = ", ".join([*shift.classes[:12], *(["…"] if len(shift.classes) > 12 else [])])
        named = f" ({names})" if names else ""
        raise DataError(
            f"{shift.name} needs a model that knows its {shift.num_classes} classes{named} in their order; this one "
            f"answers with {known}. {'Correct the class folders, or choose' if named else 'Choose'} a model of these "
            "classes."
        )


def _subject(who: _Examiner) -> dict[str, Any]:
    about = {key: value for key, value in subject_of(who.model, None).items() if key not in ("data", "images")}
    settings = {key: value for key, value in data_settings(who.data).items() if key not in UNRELATED}
    if who.temperature is not None:
        settings["temperature"] = who.temperature
    return {"data": who.shift.name, **about, **settings, "preprocessing": str(resolve(who.data, who.input_size))}


def _judge(who: _Examiner, part: Subset) -> Sequence[Remark | str]:
    """Every image of a part that the ledger lacks; what was remarkable about the part."""
    images = part.open()
    ids = chosen(images, who.data.val_num_samples)
    who.process.on_first(lambda: who.ledger.check_part(part.name, identify(images, ids, looked_at=LOOKED_AT)))
    ids = ids[who.ledger.lacks(part.name, images.keys[ids])]
    if not len(ids):
        return images.remarks
    loader = shift_loader(images, ids, who.data, who.input_size, who.process, cropped=who.shift.cropped)
    mine, done = who.process.share_of(len(ids)), 0
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
    """What the model says of a batch; where the set has a subset of the classes, only their logits count."""
    logits = logits_of(who.model, x, max(len(x), 1))  # (B, K)
    if logits.ndim == 2:
        _check_classes(logits.shape[1], who.shift)
    if who.shift.columns is not None:
        logits = logits[:, list(who.shift.columns)]
    rows = read_logits(logits, y)
    if who.temperature is not None:
        rows["tempered"] = (logits / who.temperature).softmax(-1).amax(-1)
    return rows


def shift_loader(
    images: Images, ids: Tensor, config: DataConfig, input_size: InputSize, process: Process, *, cropped: bool
) -> Loader:
    """The images `ids` (n,) of a part, each once, this `process`'s share; `cropped` ones are resized only."""
    if cropped and config.crop_pct is None:
        config = dataclasses.replace(config, crop_pct=1.0)
    part: dict[str, Any] = {"rank": process.rank, "world_size": process.world_size, "device": process.device}
    return images_loader(images, config, input_size=input_size, only=ids, **part)


def chosen(images: Images, limit: int | None) -> Tensor:
    """Ids of all images, or of as many as wanted: those with the smallest keys, so the same files in every part."""
    if limit is None or limit >= len(images):
        return torch.arange(len(images))
    return images.keys.argsort(stable=True)[:limit].sort().values


def open_shifts(specs: Sequence[str], data: DataConfig) -> list[Shift]:
    """Each set of `specs`, `imagenet-c:FOLDER`, once.

    imagenet-o is told from the validation folder of `data`, those of the model, unless another is named.
    """
    opened: dict[str, Shift] = {}
    for spec in specs:
        name = spec.partition(":")[0].strip()
        if name in opened:
            raise ConfigError(f"--shift {name} is given twice; its parts share one ledger, so give it once.")
        implied: dict[str, str] = {}
        if name == "imagenet-o" and "validation=" not in spec and data.dataset == "folder" and data.root is not None:
            with suppress(DataError):
                implied["validation"] = str(split_folder(Path(data.root), data.val_split))
        opened[name] = open_shift(spec, **implied)
    return list(opened.values())


def read_baseline(run: str | None, name: str) -> Baseline | None:
    """The errors of another `run`, or a published table's, under the shift of that `name`; None for a run of None."""
    if run is None:
        return None
    if run.lower() in PUBLISHED and not Path(run).exists():
        return PUBLISHED[run.lower()]()
    folder = Path(local_run(run))
    for place in (folder / "evaluation", folder):
        if (file := place / "shifts" / name / "report.json").exists():
            return load_shift_report(file).as_baseline(folder.name)
    raise DataError(
        f"{folder} has not been evaluated under {name}; do that first, then compare with it, or with a published "
        f"table: {', '.join(PUBLISHED)}."
    )


def temperature_of(target: Target, split: str, *, progress: Progress = no_progress) -> float:
    """Fitted on a `split` of the data of `target`, or on the images that a run has held out of its training."""
    data = target.config.data
    only, split = (_held_out(target), data.train_split) if split == HELD_OUT else (None, split)
    size, device = target.model.data_config, device_of(target.model)
    loader = eval_loader(data, input_size=size, split=split, only=only, device=device)  # every process: the same fit
    return fit_temperature(*collect_logits(target.model, loader, progress=progress))


def _held_out(target: Target) -> Tensor:
    fraction = (target.recipe.get("train") or {}).get("holdout")
    if not fraction:
        raise ConfigError(
            f"{target.folder} has held out no images of its training set; name a split that neither trained nor tests "
            "it, e.g. --calibrate val."
        )
    return held_out(target.config.data, float(fraction), seed=int(target.recipe.get("seed", 0)))
