"""How the runs of a sweep are judged: threats, checks against gradient masking, speed and cycles.

A run is judged when it is trained, and, where a plan says so, as it begins: the model before its first update, with
pretrained weights, masks and auto-encoders in place, is kept as a run folder `start` inside the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from vitruvius._errors import ConfigError
from vitruvius._files import Lock, RemoteCopy, atomic_write_text, is_url, local_path, save_tensors
from vitruvius._keys import key
from vitruvius._processes import Process
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, to_plain
from vitruvius.compression.command import cycles_of
from vitruvius.evaluation.command import EvaluateOptions, evaluate_target, read_ball
from vitruvius.evaluation.speed import measure_speed, save_speed
from vitruvius.evaluation.threats import make_threats
from vitruvius.targets import limit_images, local_run, open_target
from vitruvius.training._session import open_session
from vitruvius.training.config import Config

START = "start"


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How each run is judged when it is trained, as by `vitruvius evaluate`."""

    threats: tuple[str, ...] = field(metadata={"help": "as `vitruvius evaluate --threat` takes them: pgd:eps=4/255"})
    images: int | None = key(None, "how many images, a fixed random choice; null: all")
    overrides: tuple[str, ...] = key((), "settings such as data.dataset=…, for other images than the run's own")
    out: str = key("evaluation", "folder inside the run")
    runs: tuple[str, ...] = key(("*",), "patterns of the names of the runs that are judged so")
    start: bool = key(False, "judge the model as the run begins, before its first update, in the folder start/")
    sanity: str | float | None = key(None, "also check for gradient masking at this radius: 8/255, l2:0.5; null: no")
    speed: int = key(0, "also time the forward pass in batches of this many images; 0: no")
    cycles: bool = key(False, "also count the cycles of ViTCoD's accelerator; the run must have masks")

    def is_for(self, name: str) -> bool:
        """Whether the run of this `name` is judged so."""
        return any(fnmatchcase(name, pattern) for pattern in self.runs)


def check_plans(plans: Sequence[EvaluationPlan]) -> None:
    """Find a misspelt threat before hours of training; plugins may have brought some. `plans` are those of a sweep."""
    for plan in plans:
        limit_images(plan.images)
        read_ball(plan.sanity)
        if plan.speed < 0:
            raise ConfigError(f"evaluate.speed = {plan.speed}, expected the images of a batch, or 0.")
        for spec in plan.threats:
            make_threats(spec, where="evaluate.threats")


def check_names(plans: Sequence[EvaluationPlan], names: Sequence[str], source: str) -> None:
    """Refuse `plans` for runs that are not there; `names` are those of the runs, `source` is the sweep file."""
    for pattern in [pattern for plan in plans for pattern in plan.runs]:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{source}: evaluate.runs: {pattern!r} fits no run; there are {', '.join(names)}.")


def keep_start(config: Config, plans: Sequence[EvaluationPlan], process: Process, tell: Callable[[str], None]) -> None:
    """Keep the model of a run as it begins, if one of its `plans` judges it; once.

    `config` is the run's; `process` is this one; `tell` is given a line about data, model and each site that is fitted.
    """
    folder = _start(config)
    wanted = any(plan.start for plan in plans)
    if not wanted or process.broadcast((folder / "config.yaml").is_file()):
        return
    session = open_session(config, process, tell=tell)
    weights = {name: value.detach().cpu() for name, value in session.weights().items()}
    recipe = redact({**to_plain(session.config), "out": str(folder)})

    def write() -> None:
        save_tensors(folder / "best.safetensors", weights, {"vitruvius": json.dumps(__version__)})
        atomic_write_text(folder / "config.yaml", dump_yaml(recipe))  # last: a run folder is whole when it has one

    process.on_first(write)


def judge(config: Config, plans: Sequence[EvaluationPlan], process: Process) -> None:
    """Judge one run by its `plans`, in order; what is there already is not done again.

    `config` is the run's; `process` is this one.
    """
    folder = str(config.out)
    for plan in plans:
        target = Path(local_run(folder))
        if plan.start:
            target = _start(config)
        out = target / plan.out
        evaluate_target(str(target), plan.overrides, _options(plan, out), str(out))
        if process.first:
            _measure(plan, target, out, process)
    if is_url(folder):
        with Lock(folder):
            RemoteCopy(folder, local_path(folder)).upload()


def _start(config: Config) -> Path:
    folder = str(config.out)
    if is_url(folder):
        return Path(local_path(folder)) / START
    return Path(folder) / START


def _options(plan: EvaluationPlan, out: Path) -> EvaluateOptions:
    """What is asked of the evaluation; checks against masking are not kept image by image, so they are made once."""
    options = EvaluateOptions(threats=plan.threats, images=plan.images, sanity=plan.sanity)
    if (out / "sanity.json").is_file():
        return replace(options, sanity=None)
    return options


def _measure(plan: EvaluationPlan, target: Path, out: Path, process: Process) -> None:
    """Speed and cycles."""
    if plan.speed and not (out / "speed.json").is_file():
        model = open_target(str(target), data_needed=False).model.to(process.device).eval()
        save_speed(measure_speed(model, model.data_config["input_size"], batch_size=plan.speed), out / "speed.json")
    if plan.cycles:
        cycles_of(str(target))
