"""What an evaluation under shifts is asked for by name: the sets, the run to compare with, a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._progress import Progress, no_progress
from vitruvius.data import DataConfig, eval_loader, held_out
from vitruvius.data.base import split_folder
from vitruvius.evaluation.metrics import Baseline, collect_logits, fit_temperature
from vitruvius.evaluation.shift_report import load_shift_report
from vitruvius.shifts.base import Shift, open_shift
from vitruvius.targets.base import Target, local_run

HELD_OUT = "held-out"


def open_shifts(specs: Sequence[str], data: DataConfig) -> list[Shift]:
    """Each set of `specs`, `imagenet-c:FOLDER`, once.

    imagenet-o is told from the validation folder of `data`, those of the model, unless another is named.
    """
    opened: dict[str, Shift] = {}
    for spec in specs:
        name = spec.partition(":")[0].strip()
        if name in opened:
            raise ConfigError(f"--shift {name} is given twice; its parts share one ledger, so give it once.")
        implied = _validation(data) if name == "imagenet-o" and "validation=" not in spec else {}
        opened[name] = open_shift(spec, **implied)
    return list(opened.values())


def _validation(data: DataConfig) -> dict[str, str]:
    if data.dataset != "folder" or data.root is None:
        return {}
    try:
        return {"validation": str(split_folder(Path(data.root), data.val_split))}
    except DataError:
        return {}


def read_baseline(run: str | None, name: str) -> Baseline | None:
    """The errors of another `run` under the shift of that `name`; None for a run of None."""
    if run is None:
        return None
    run = local_run(run)
    file = Path(run) / "evaluation" / "shifts" / name / "report.json"
    if not file.exists():
        file = Path(run) / "shifts" / name / "report.json"
    if not file.exists():
        raise DataError(f"{run} has not been evaluated under {name}; do that first, then compare with it.")
    return load_shift_report(file).as_baseline(Path(run).name)


def temperature_of(target: Target, split: str, *, progress: Progress = no_progress) -> float:
    """Fitted on a `split` of the data of `target`, or on the images that a run has held out of its training."""
    data = target.config.data
    only = None
    if split == HELD_OUT:
        only = _held_out(target)
        split = data.train_split
    loader = eval_loader(
        data, input_size=target.model.data_config, split=split, only=only, device=device_of(target.model)
    )  # all images on every process: each fits the same number
    return fit_temperature(*collect_logits(target.model, loader, progress=progress))


def _held_out(target: Target) -> Tensor:
    fraction = (target.recipe.get("train") or {}).get("holdout") or 0.0
    if not fraction:
        raise ConfigError(
            f"{target.folder} has held out no images of its training set; name a split that neither trained nor tests "
            "it, e.g. --calibrate val."
        )
    return held_out(target.config.data, float(fraction), seed=int(target.recipe.get("seed", 0)))
