"""How the runs of a sweep are judged: threats, checks against gradient masking, speed and cycles.

A run is judged when it is trained, and, where a plan says so, as it begins: the model before its first update, with
pretrained weights, masks and auto-encoders in place, is kept as a run folder `start` inside the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError
from vitruvius._files import Lock, Mirror, atomic_write_text, is_url, place_of, save_tensors
from vitruvius._processes import Process
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, to_plain
from vitruvius.compression.steps import cycles_of
from vitruvius.evaluation import data_settings, evaluate
from vitruvius.evaluation.examination import examine, read_ball, save_findings
from vitruvius.evaluation.speed import measure_speed, save_speed
from vitruvius.evaluation.threats import make_threats
from vitruvius.request import Request, open_request
from vitruvius.targets.base import local_run
from vitruvius.training._session import open_session
from vitruvius.training.config import Config, EvaluationPlan

START = "start"
logger = logging.getLogger(__name__)


def check_plans(plans: Sequence[EvaluationPlan]) -> None:
    """Find a misspelt threat before hours of training; plugins may have brought some. `plans` are those of a sweep."""
    for plan in plans:
        if plan.images is not None:
            check_count(plan.images, "evaluate.images")
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
        place = target / plan.out
        with open_request(str(target), plan.overrides, images=plan.images, out=place, writes="evaluation") as request:
            _judge(request, plan)
            if process.first:
                _measure(request, plan, target, place)
    if is_url(folder):
        with Lock(folder):
            Mirror(folder, place_of(folder)).push()


def _start(config: Config) -> Path:
    folder = str(config.out)
    if is_url(folder):
        return Path(place_of(folder)) / START
    return Path(folder) / START


def _judge(request: Request, plan: EvaluationPlan) -> None:
    """Threats, and checks against masking, which are not kept image by image and so are made once."""
    threats = [threat for spec in plan.threats for threat in make_threats(spec, where="evaluate.threats")]
    with request.bar("evaluating") as bar:
        evaluate(
            request.model,
            request.loader,
            threats,
            folder=request.folder,
            process=request.process,
            progress=bar,
            on_news=logger.info,
            signature=data_settings(request.config.data),
        )
    ball, findings = read_ball(plan.sanity), request.folder / "sanity.json"
    if ball is not None and request.process.first and not findings.is_file():
        norm, eps = ball
        with request.bar("checking") as bar:
            save_findings(examine(request.model, request.loader, eps, norm=norm, progress=bar), findings)


def _measure(request: Request, plan: EvaluationPlan, target: Path, place: Path) -> None:
    """Speed and cycles."""
    if plan.speed and not (place / "speed.json").is_file():
        model = request.model
        save_speed(measure_speed(model, model.data_config["input_size"], batch_size=plan.speed), place / "speed.json")
    if plan.cycles:
        cycles_of(str(target))
