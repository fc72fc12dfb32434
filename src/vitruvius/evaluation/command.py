"""The verb `evaluate` as a command uses it: open the target, make the threats, keep the ledgers in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitruvius._processes import Process, process_group
from vitruvius.data import Loader, eval_loader
from vitruvius.evaluation._evaluate import evaluate
from vitruvius.evaluation._names import Threat
from vitruvius.evaluation._shift_command import open_shifts, read_baseline, temperature_of
from vitruvius.evaluation._shift_text import format_corruption
from vitruvius.evaluation._subject import data_settings
from vitruvius.evaluation._target import (
    TargetConfig,
    check_head,
    check_numbering,
    open_target,
    parse_threats,
    save_target,
)
from vitruvius.evaluation._watch import Watch
from vitruvius.evaluation.examination import examine, save_findings
from vitruvius.evaluation.metrics import Baseline
from vitruvius.evaluation.result import Report
from vitruvius.evaluation.sanity import Finding
from vitruvius.evaluation.shift import check_fit, evaluate_shift
from vitruvius.evaluation.shift_report import ShiftReport, corruption_report
from vitruvius.models import PixelModel
from vitruvius.shifts import Shift


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a command asks for besides its target."""

    threats: Sequence[str] = ()  # pgd:eps=4/255,steps=10
    shifts: Sequence[str] = ()  # imagenet-c:/path
    sanity: float | None = None  # ε of the checks against gradient masking
    calibrate: str | None = None  # split that a temperature is fitted on; held-out: of a run's own training images
    baseline: str | None = None  # another run, evaluated under the same shifts, that mCE is against


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything a command found; no report where only shifts were asked for and no data was named."""

    report: Report | None
    corruptions: ShiftReport | None = None  # what threats that are corruptions come to
    findings: list[Finding] = field(default_factory=list)
    shifts: list[ShiftReport] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [] if self.report is None else [str(self.report)]
        if self.corruptions is not None:
            parts[-1] = "\n".join([*parts[-1:], *format_corruption(self.corruptions.corruption)])
        findings = ["\n".join(map(str, self.findings))] if self.findings else []
        return "\n\n".join([*parts, *findings, *map(str, self.shifts)])


@dataclass(frozen=True, kw_only=True)
class _Target:
    """The model and its surroundings."""

    target: str
    overrides: Sequence[str]
    model: PixelModel
    config: TargetConfig
    folder: Path
    process: Process


def evaluate_target(
    target: str,
    overrides: Sequence[str],
    wish: Wish,
    out: str | None = None,
    *,
    tell: Callable[[Evaluation], object] = lambda _: None,
) -> Evaluation:
    """Evaluate a run folder or a model by name; ledgers and reports go to `out`, by default into the run.

    `tell` is given each part as soon as it is known, on the first process.
    """
    made = [threat for text in wish.threats for threat in parse_threats(text)]
    is_run = Path(target).is_dir()
    named = is_run or any(setting.startswith("data.dataset=") for setting in overrides)
    wanted = bool(made or wish.sanity is not None or wish.calibrate or not wish.shifts)
    model, config = open_target(target, overrides, data_needed=wanted)
    check_head(target, model)
    shifts = open_shifts(wish.shifts, config.data)
    for one in shifts:
        check_fit(model, one)  # before hours go into what comes first
    corrupting = any(getattr(threat, "severity", None) is not None for threat in made)
    names = [shift.name for shift in shifts] + (["corruptions"] if corrupting else [])
    baselines = {name: read_baseline(wish.baseline, name) for name in names}
    home = Path(target) if is_run else Path("runs") / target.replace("/", "-")
    with process_group(config.device) as process:
        model.to(process.device).eval()
        folder = Path(out or home / "evaluation")
        here = _Target(target=target, overrides=overrides, model=model, config=config, folder=folder, process=process)
        temperature = temperature_of(model, config, target, wish.calibrate, process) if wish.calibrate else None
        say = tell if process.first else lambda _: None
        report = _evaluate(here, made) if wanted or named else None
        corruptions = _corrupted(here, report, baselines["corruptions"]) if corrupting and report else None
        if report is not None:
            say(Evaluation(report=report, corruptions=corruptions))
        findings = _examine(here, wish.sanity) if wish.sanity is not None and process.first else []
        if findings:
            say(Evaluation(report=None, findings=findings))
        reports = []
        for one in shifts:
            reports.append(_evaluate_shift(here, one, baselines[one.name], report, temperature))
            say(Evaluation(report=None, shifts=reports[-1:]))
        if not is_run and process.first:
            save_target(config, Path(out) if out else home)
    return Evaluation(report=report, corruptions=corruptions, findings=findings, shifts=reports)


def _evaluate(here: _Target, threats: Sequence[Threat]) -> Report:
    """Clean images and threats."""
    with Watch(shown=here.process.first) as watch:
        return evaluate(
            here.model,
            _loader(here),
            threats,
            folder=here.folder,
            process=here.process,
            progress=watch,
            signature=data_settings(here.config.data),
        )


def _loader(here: _Target) -> Loader:
    process = here.process
    loader = eval_loader(
        here.config.data,
        input_size=here.model.data_config,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
    )
    check_numbering(here.target, here.overrides, here.model, here.config.data, loader)
    return loader


def _corrupted(here: _Target, report: Report, baseline: Baseline | None) -> ShiftReport | None:
    """`evaluate` has kept what corruptions come to; against a baseline it is kept anew."""
    found = corruption_report(report, baseline)
    if found is not None and baseline is not None and here.process.first:
        found.save(here.folder / "shifts" / found.name / "report.json")
    return found


def _examine(here: _Target, eps: float) -> list[Finding]:
    findings = examine(here.model, _loader(here), eps)
    save_findings(findings, here.folder / "sanity.json")
    return findings


def _evaluate_shift(
    here: _Target, shift: Shift, baseline: Baseline | None, report: Report | None, temperature: float | None
) -> ShiftReport:
    with Watch(shown=here.process.first, title=shift.name, what="batch") as watch:
        return evaluate_shift(
            here.model,
            shift,
            data=here.config.data,
            folder=here.folder / "shifts" / shift.name,
            process=here.process,
            progress=watch,
            temperature=temperature,
            baseline=baseline,
            clean_error=None if report is None else 1 - report["clean"].accuracy,
        )
