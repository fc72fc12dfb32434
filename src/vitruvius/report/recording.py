"""What the page shows of a run's model and was not measured before: its sites, and its attention on a few images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from vitruvius._checks import check_count
from vitruvius._errors import VitruviusError
from vitruvius.analysis.recording import record_pictures
from vitruvius.data import DataConfig
from vitruvius.data.naming import class_words
from vitruvius.evaluation.threats import Threat, describe
from vitruvius.report.gathering import is_study, is_sweep, runs_in
from vitruvius.report.run import check_runs
from vitruvius.request import open_request
from vitruvius.targets.run_folder import WEIGHTS

IMAGES = 8
ASIDE = (VitruviusError, OSError, RuntimeError)  # what keeps a page from having a viewer, and not from being written
logger = logging.getLogger(__name__)


def record_missing(
    folders: Sequence[Path],
    overrides: Sequence[str],
    images: int | None,
    threat: Threat,
    *,
    trust_plugins: bool = False,
) -> None:
    """Record what a page about these folders needs and that is not there.

    folders: run folders, sweeps and studies; runs of the latter are recorded only where `images` asks for it.
    overrides: settings of the runs, `data.root=…`, for where their images are now.
    images: of each run; None: IMAGES, unless they are recorded already, and a run whose data or model cannot be opened
        gets a line that says why; 0: nothing is recorded.
    threat: attacks the images. trust_plugins: as for `open_target`.
    """
    runs = [folder for folder in folders if not is_sweep(folder) and not is_study(folder)]
    if runs:
        check_runs(runs)
    if images == 0:
        return
    if images is not None:
        check_count(images, "--images")
        runs = runs_in(folders)
    for run in runs:
        if images is None and _is_recorded(run):
            continue
        try:
            record_run(run, overrides, images or IMAGES, threat, trust_plugins=trust_plugins)
        except ASIDE as error:
            if images is not None:
                raise
            logger.info("%s: no attention viewer: %s", run, " ".join(str(error).split()))


def record_run(
    run: Path, overrides: Sequence[str], images: int, threat: Threat, *, trust_plugins: bool = False
) -> None:
    """Keep the sites of a run's model, and its attention on some images of its validation split, clean and attacked.

    run: the folder. overrides: settings `data.…`, `device=…`. images: how many; which ones, `vitruvius.request` says.
    threat: attacks them; a model without a head, which has no answer to change, is shown clean images alone.
    trust_plugins: as for `open_target`.
    """
    settings = ["data.workers=0", *overrides]
    with open_request(
        str(run), settings, images=images, out=run, labels=False, trust_plugins=trust_plugins, alone=True
    ) as request:
        request.labels = request.model.num_classes > 0
        attack = threat if request.labels else None
        done = f"clean and under {describe(threat)}" if attack else "clean, since the model has no head"
        logger.info("%s: recording attention on %d pictures, %s", run, images, done)
        loader = request.loader  # only now: what cannot be opened is not touched
        with request.bar(f"recording {run}") as bar:
            names = _class_words(request.config.data)
            record_pictures(request.folder, request.model, loader, attack, names=names, progress=bar)


def _is_recorded(run: Path) -> bool:
    """Whether the viewer's files are there and not older than the weights."""
    record = run / "attention.json"
    if not record.is_file() or not (run / "model.json").is_file():
        return False
    made = record.stat().st_mtime
    return all((run / name).stat().st_mtime <= made for name in WEIGHTS if (run / name).is_file())


def _class_words(data: DataConfig) -> tuple[str, ...]:
    try:
        return class_words(data)
    except ASIDE:
        return ()
