"""The verb `report` as a command uses it: record what the viewer needs in each run, then write the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._config import build, override
from vitruvius._errors import DataError, VitruviusError
from vitruvius._files import Lock, check_new_file
from vitruvius._processes import choose_device
from vitruvius._progress import Bar, part_of, scaled
from vitruvius._yaml import read_yaml
from vitruvius.attacks.base import disturb
from vitruvius.data import DataConfig, Loader, class_words, eval_loader, is_stream
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.models import create_from_config
from vitruvius.report._record import record_examples, save_model_facts
from vitruvius.report._runs import check_runs
from vitruvius.report.gathering import is_study, is_sweep, runs_in
from vitruvius.report.page import write_page
from vitruvius.targets import (
    Target,
    TargetConfig,
    check_head,
    check_numbering,
    load_target_plugins,
    local_run,
    open_target,
)

IMAGES = 8
THREAT = "pgd:eps=8/255,steps=10"
WEIGHTS = ("best.safetensors", "last.safetensors")
ASIDE = (VitruviusError, OSError, RuntimeError)  # what keeps a page from having a viewer, and not from being written


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a command asks for besides its runs."""

    title: str = "A vitruvius report"
    images: int | None = None  # pictures in the viewer; None: IMAGES where they can be opened, 0: as recorded before
    threat: str = THREAT  # what the attacked views of the pictures come from


def report_runs(
    runs: Sequence[str],
    overrides: Sequence[str],
    out: str | Path,
    options: ReportOptions,
    *,
    on_news: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write a page about run folders, with a viewer of their attention; its path.

    runs: run folders or their URLs, shown side by side, sweeps and studies; runs of the latter get a viewer only if it
        is asked for.
    overrides: settings of the runs, `data.root=…`, for where their pictures are now.
    out: the file of the page.
    options: title, pictures and their attack. Where a number of pictures is asked for, a run whose data or model
        cannot be opened is an error; by default such a run has no viewer, and a line says why.
    on_news: called with a sentence about each run before it is recorded, and about what could not be.
    """
    folders = [Path(local_run(run)) for run in runs]
    check_new_file(out, "report.html")
    shown = [folder for folder in folders if not is_sweep(folder) and not is_study(folder)]
    if shown:
        check_runs(shown)
    threat = make_threat(options.threat, where="--threat")
    if options.images:
        check_count(options.images, "--images")
        shown = runs_in(folders)
    if options.images != 0:
        for folder in shown:
            _record_if_wanted(folder, overrides, options.images, threat, on_news)
    with Lock(out, file=True):
        return write_page(folders, out, title=options.title)


def _record_if_wanted(
    folder: Path,
    overrides: Sequence[str],
    images: int | None,
    threat: Threat,
    on_news: Callable[[str], object],
) -> None:
    if images is None and _is_recorded(folder):
        return
    count = images or IMAGES
    on_news(f"{folder}: recording attention on {count} pictures, clean and under {describe(threat)}")
    try:
        record_run(folder, overrides, count, threat)
    except ASIDE as error:
        if images is not None:
            raise
        on_news(f"{folder}: no attention viewer: {' '.join(str(error).split())}")


def record_run(folder: str | Path, overrides: Sequence[str], images: int, threat: Threat) -> None:
    """Keep what the page shows of a run's model: its sites, and its attention on pictures of its validation split.

    folder: the run. overrides: settings `data.…`, `device=…`. images: how many pictures. threat: attacks them.
    """
    target = _open(Path(folder), overrides)
    check_head(target)
    with Lock(folder):  # only now: what cannot be opened is not touched
        _record(target, folder, images, threat)


def _record(target: Target, folder: str | Path, images: int, threat: Threat) -> None:
    device = choose_device(target.config.device)
    model = target.model.to(device).eval()
    save_model_facts(folder, model)
    data = replace(target.config.data, workers=0, batch_size=_sample(images), eval_batch_size=None)
    if not is_stream(data):
        data = replace(data, val_num_samples=_sample(images))
    loader = eval_loader(data, input_size=model.data_config, device=device)
    check_numbering(target, loader)
    x, y, ids = choose_pictures(loader, images)
    with Bar(f"attacking the pictures of {folder}") as bar:
        attacked = disturb(threat, model, x, y, ids, part_of(scaled(bar, len(x)), 0, 0, describe(threat)))
    record_examples(
        folder,
        model,
        x,
        y.tolist(),
        attacked=attacked,
        threat=describe(threat),
        names=_words(data),
        pictures=[f"{loader.name} {number}" for number in ids.tolist()],
    )


def choose_pictures(loader: Loader, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some images of a loader's first batch, with labels and ids: one of each class, then others.

    loader: batches with ids. count: how many; fewer where the batch has fewer.
    """
    batch = next(loader.with_ids(), None)
    if batch is None or not len(batch[1]):
        raise DataError(f"{loader.name} has no images; nothing to view.")
    x, y, ids = batch
    labels = y.tolist()
    first = [row for row, label in enumerate(labels) if label not in labels[:row]]
    others = [row for row in range(len(labels)) if row not in first]
    rows = sorted([*first, *others][:count], key=lambda row: (labels[row], row))
    chosen = torch.tensor(rows)
    return x[chosen.to(x.device)], y[chosen.to(y.device)], ids[chosen]


def _open(folder: Path, overrides: Sequence[str]) -> Target:
    """A run with its weights, or the model by name whose evaluation left its results in the folder."""
    if any((folder / name).is_file() for name in WEIGHTS) or not _is_by_name(folder):
        return open_target(str(folder), overrides)
    load_target_plugins(str(folder), overrides)
    known = {key: value for key, value in read_yaml(folder / "config.yaml").items() if key != "versions"}
    config = build(TargetConfig, override(known, overrides), source=str(folder))
    model = create_from_config(config.model, config.attention, seed=config.seed)
    return Target(text=str(folder), model=model, config=config, folder=folder)


def _is_by_name(folder: Path) -> bool:
    """Whether the folder holds what is known of a model by name, and no recipe of a training."""
    return "train" not in read_yaml(folder / "config.yaml")


def _is_recorded(folder: Path) -> bool:
    """Whether the viewer's files are there and not older than the weights."""
    record = folder / "attention.json"
    if not record.is_file() or not (folder / "model.json").is_file():
        return False
    made = record.stat().st_mtime
    return all((folder / name).stat().st_mtime <= made for name in WEIGHTS if (folder / name).is_file())


def _sample(images: int) -> int:
    """How many images are read to find pictures of different classes among them."""
    return max(4 * images, 32)


def _words(data: DataConfig) -> tuple[str, ...]:
    try:
        return class_words(data)
    except ASIDE:
        return ()
