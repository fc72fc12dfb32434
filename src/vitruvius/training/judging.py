"""How the runs of a sweep are judged, and the masks that they share.

A run is judged when it is trained, and, where a plan says so, as it starts: the model before its first update, with
pretrained weights, masks and auto-encoders in place, is kept as a run folder `start` inside the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._errors import ConfigError, VitruviusError
from vitruvius._files import Lock, RemoteCopy, atomic_write_text, is_url, local_path, save_tensors
from vitruvius._processes import Process
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, to_plain
from vitruvius.compression.steps import cycles_of, read_rules, write_maps, write_masks
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.base import data_settings
from vitruvius.evaluation.sanity import examine, read_ball, save_findings
from vitruvius.evaluation.speed import measure_speed, save_speed
from vitruvius.evaluation.threats import make_threats
from vitruvius.request import Request, open_request
from vitruvius.surgery import survey
from vitruvius.targets.base import local_run, open_target
from vitruvius.training.config import Config, EvaluationPlan, MapsPlan, MaskPlan
from vitruvius.training.session import open_session, start_folder

logger = logging.getLogger(__name__)


def check_plans(plans: Sequence[EvaluationPlan]) -> None:
    """Find a misspelt threat before hours of training; plugins may have brought some."""
    for plan in plans:
        read_ball(plan.sanity)
        for spec in plan.threats:
            make_threats(spec, where="evaluate.threats")


def keep_start(config: Config, plans: Sequence[EvaluationPlan], process: Process) -> None:
    """Keep the model of a run as it starts, once, if one of its `plans` judges it."""
    folder = start_folder(config)
    if not any(plan.start for plan in plans) or process.broadcast((folder / "config.yaml").is_file()):
        return
    session = open_session(config, process)
    weights = {name: value.detach().cpu() for name, value in session.weights().items()}
    recipe = redact({**to_plain(session.config), "out": str(folder)})

    def write() -> None:
        save_tensors(folder / "best.safetensors", weights, {"vitruvius": json.dumps(__version__)})
        atomic_write_text(folder / "config.yaml", dump_yaml(recipe))  # last: a run folder is whole when it has one

    process.on_first(write)


def judge(config: Config, plans: Sequence[EvaluationPlan], process: Process) -> None:
    """Judge one run by its `plans`, in order; what is there already is not done again."""
    folder = str(config.out)
    for plan in plans:
        target = start_folder(config) if plan.start else Path(local_run(folder))
        out = target / plan.out
        with open_request(str(target), plan.overrides, images=plan.images, out=out, writes="evaluation") as request:
            _judge(request, plan)
        if process.first and plan.cycles:
            cycles_of(str(target))
    if is_url(folder):
        with Lock(folder):
            RemoteCopy(folder, local_path(folder)).upload()


def _judge(request: Request, plan: EvaluationPlan) -> None:
    """Threats; then, on the first process and once, checks against masking and speed, which have no ledger."""
    threats = [threat for spec in plan.threats for threat in make_threats(spec, where="evaluate.threats")]
    with request.bar("evaluating") as bar:
        evaluate(
            request.model,
            request.loader,
            threats,
            folder=request.folder,
            process=request.process,
            progress=bar,
            signature=data_settings(request.config.data),
        )
    if not request.process.first:
        return
    ball, findings, speed = read_ball(plan.sanity), request.folder / "sanity.json", request.folder / "speed.json"
    if ball is not None and not findings.is_file():
        norm, eps = ball
        with request.bar("checking") as bar:
            save_findings(examine(request.model, request.loader, eps, norm=norm, progress=bar), findings)
    if plan.speed and not speed.is_file():
        model = request.model
        save_speed(measure_speed(model, model.data_config["input_size"], batch_size=plan.speed), speed)


# masks


def check_masks(maps: MapsPlan | None, masks: Sequence[MaskPlan], source: str) -> None:
    """Refuse masks without maps, maps without masks, and rules that are not known; `source` is the sweep file."""
    if bool(masks) != (maps is not None):
        raise ConfigError(f"{source}: maps and masks belong together; there is only one of them.")
    for plan in masks:
        read_rules(plan.rule)


def check_trained(maps: MapsPlan) -> None:
    if not (Path(maps.of) / "config.yaml").is_file():
        raise ConfigError(f"the masks of this sweep are made of the run {maps.of}, which is not there: train it first.")


def needs_missing_masks(config: Config, masks: Sequence[MaskPlan]) -> bool:
    """Whether a run names files of the sweep's `masks` that are not made yet."""
    parts = [part for rule in config.attention for part in rule.parts if isinstance(part, dict)]
    needed = {str(part.get("file")) for part in parts} | {config.gradual.masks if config.gradual else ""}
    return any(plan.file in needed and not Path(plan.file).is_file() for plan in masks)


def make_missing(maps: MapsPlan | None, masks: Sequence[MaskPlan], overrides: Sequence[str]) -> None:
    """Maps and masks that are not there yet. What cannot be made is logged, and only runs that need it fail."""
    missing = [plan for plan in masks if not Path(plan.file).is_file()]
    if maps is None or not missing:
        return
    check_trained(maps)
    if not Path(maps.file).is_file():
        logger.info("maps of %s", maps.of)
        place: dict[str, Any] = {"out": maps.file, "writes": "maps.safetensors", "split": "training", "labels": False}
        with open_request(maps.of, overrides, images=maps.images, **place) as request:
            write_maps(request)
    sites = survey(open_target(maps.of, overrides, data_needed=False).model)
    for plan in missing:
        logger.info("masks %s", plan.file)
        settings = {name: getattr(plan, name) for name in ("sparsity", "budget", "tiles")}
        try:
            write_masks(maps.file, plan.rule, plan.file, sites=sites, **settings)
        except VitruviusError as error:
            logger.info("    failed: %s", " ".join(str(error).split()))
