"""The verb `evaluate` as a command uses it: open the target, make the threats, keep the ledgers in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitruvius._errors import ConfigError
from vitruvius._files import Lock
from vitruvius._processes import Process, process_group
from vitruvius._progress import Bar
from vitruvius._signals import keeping
from vitruvius._yaml import parse_value
from vitruvius.attacks.base import Ensemble, Norm, as_norm
from vitruvius.corruptions.base import corruptions
from vitruvius.data import Loader, eval_loader
from vitruvius.evaluation._evaluate import evaluate
from vitruvius.evaluation._shift_command import open_shifts, read_baseline, temperature_of
from vitruvius.evaluation._text import format_corruption
from vitruvius.evaluation.base import data_settings
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.masking import Finding
from vitruvius.evaluation.metrics import Baseline
from vitruvius.evaluation.result import Report
from vitruvius.evaluation.sanity import Sanity, examine, save_findings
from vitruvius.evaluation.shift import check_fit, evaluate_shift
from vitruvius.evaluation.shift_report import ShiftReport, corruption_report
from vitruvius.evaluation.threats import Threat, make_threats
from vitruvius.shifts.base import Shift
from vitruvius.targets import Target, check_head, check_numbering, limit_images, load_target_plugins, open_target


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What a command asks for besides its target."""

    threats: Sequence[str] = ()  # pgd:eps=4/255,steps=10
    shifts: Sequence[str] = ()  # imagenet-c:/path
    sanity: str | float | None = None  # ε of the checks against gradient masking, in pixels: 8/255; l2:0.5
    calibrate: str | None = None  # split that a temperature is fitted on; held-out: of a run's own training images
    images: int | None = None  # how many images of the data to judge, a fixed random choice; default all
    fresh: bool = False  # delete what an earlier evaluation has left in the folder
    baseline: str | None = None  # another run, evaluated under the same shifts, that mCE is against

    @property
    def needs_images(self) -> bool:
        """Whether the target's own images are judged; shifts bring theirs."""
        return bool(self.threats or self.sanity is not None or self.calibrate or not self.shifts)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything a command found; no report where only shifts were asked for and no data was named."""

    report: Report | None = None
    corruptions: ShiftReport | None = None  # the summary of threats that are corruptions
    findings: list[Finding] = field(default_factory=list)
    shifts: list[ShiftReport] = field(default_factory=list)

    def __str__(self) -> str:
        paragraphs = []
        if self.report is not None:
            lines = [str(self.report)]
            if self.corruptions is not None:
                lines += format_corruption(self.corruptions.corruption)
            paragraphs.append("\n".join(lines))
        if self.findings:
            paragraphs.append("\n".join(map(str, self.findings)))
        return "\n\n".join([*paragraphs, *map(str, self.shifts)])


OnPart = Callable[[Evaluation], object]


def evaluate_target(
    target: str,
    overrides: Sequence[str],
    options: EvaluateOptions,
    out: str | None = None,
    *,
    on_part: OnPart = lambda _: None,
) -> Evaluation:
    """Evaluate whatever names a model; ledgers and reports go to a folder.

    target: a run folder, a model's name, or another kind of target.
    overrides: settings of the target, `data.root=…`.
    options: threats, shifts and checks.
    out: the folder for ledgers and reports; by default `evaluation` in the run, or in runs/NAME.
    on_part: called with each part of the evaluation as soon as it is known, on the first process.
    """
    sanity = read_ball(options.sanity)
    _refuse_idle_options(options)
    load_target_plugins(target, overrides)
    threats = [threat for spec in options.threats for threat in make_threats(spec, where="--threat")]
    overrides = [*overrides, *limit_images(options.images)]
    opened = open_target(target, overrides, data_needed=options.needs_images)
    check_head(opened)
    shifts = open_shifts(options.shifts, opened.config.data)
    for shift in shifts:
        check_fit(opened.model, shift)  # before hours go into what comes first
    baselines = _read_baselines(options, threats, shifts)
    folder = Path(out or opened.folder / "evaluation")
    with keeping(lambda: _describe_kept(folder)), process_group(opened.config.device) as process:
        opened.model.to(process.device).eval()
        job = _Job(
            target=opened,
            options=options,
            sanity=sanity,
            folder=folder,
            process=process,
            baselines=baselines,
            on_part=on_part,
        )
        lock = Lock(folder)
        try:
            process.on_first(lock.take)
            if options.fresh:
                process.on_first(lambda: _clear(job.folder))
            found = _run(job, threats, shifts, with_images=options.needs_images or _has_images(opened, overrides))
            if process.first:
                opened.save_config(Path(out) if out else None)
        finally:
            lock.release()
    return found


def _refuse_idle_options(options: EvaluateOptions) -> None:
    """Refuse options that would do nothing."""
    if options.calibrate is not None and not options.shifts:
        raise ConfigError("--calibrate fits a temperature for shifted images; name them with --shift, or leave it out.")
    has_corruptions = any(spec.partition(":")[0] in ("corruptions", *corruptions) for spec in options.threats)
    if options.baseline is not None and not options.shifts and not has_corruptions:
        raise ConfigError(
            "--baseline compares errors on shifted images; name some with --shift, or --threat corruptions, or leave "
            "it out."
        )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The opened target, what is asked of it, and where results go."""

    target: Target
    options: EvaluateOptions
    sanity: tuple[Norm, float] | None  # norm and radius of the checks
    folder: Path
    process: Process
    baselines: Mapping[str, Baseline | None]
    on_part: OnPart

    def tell(self, part: Evaluation) -> None:
        """Hand on one part, on the first process only."""
        if self.process.first:
            self.on_part(part)

    def loader(self) -> Loader:
        """This process's share of the images."""
        loader = eval_loader(
            self.target.config.data,
            input_size=self.target.model.data_config,
            rank=self.process.rank,
            world_size=self.process.world_size,
            device=self.process.device,
        )
        check_numbering(self.target, loader)
        return loader


def _run(job: _Job, threats: Sequence[Threat], shifts: Sequence[Shift], *, with_images: bool) -> Evaluation:
    """The parts in turn: temperature, clean images and threats, sanity checks, shifts."""
    options = job.options
    temperature = None
    if options.calibrate is not None:
        temperature = temperature_of(job.target, options.calibrate, job.process)
    report = corruptions = None
    if with_images:
        report = _evaluate(job, threats)
        corruptions = _summarise_corruptions(job, report, threats)
        job.tell(Evaluation(report=report, corruptions=corruptions))
    findings: list[Finding] = []
    if job.sanity is not None and job.process.first:
        findings = _examine(job, *job.sanity)
        job.tell(Evaluation(findings=findings))
    reports = []
    for shift in shifts:
        reports.append(_evaluate_shift(job, shift, report, temperature))
        job.tell(Evaluation(shifts=reports[-1:]))
    return Evaluation(report=report, corruptions=corruptions, findings=findings, shifts=reports)


def _describe_kept(folder: Path) -> str:
    """What somebody who interrupts will find, in a sentence."""
    if any(folder.rglob("parts/*.safetensors")) or any(folder.rglob("ledger.safetensors")):
        return f"{folder} keeps the images judged so far; the same command goes on from there."
    return "no image was judged yet; the same command begins anew."


def _clear(folder: Path) -> None:
    """Delete the ledgers of earlier evaluations, of shifts too."""
    for one in (folder, *(folder / "shifts").glob("*")):
        Ledger(one).clear()


def read_ball(text: str | float | None) -> tuple[Norm, float] | None:
    """Norm and radius as a command writes them: 8/255 in linf, l2:0.5, l1:12; None for a `text` of None."""
    if text is None:
        return None
    norm, colon, radius = str(text).rpartition(":")
    if not colon:
        norm = "linf"
    value = parse_value(radius)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"--sanity {text} is not a number; write a strength in pixels such as 8/255, or with its norm, l2:0.5."
        )
    checks = Sanity(eps=float(value), norm=as_norm(norm))  # which refuses what is no radius
    return checks.norm, checks.eps


def _has_images(target: Target, overrides: Sequence[str]) -> bool:
    return target.is_run or any(setting.startswith("data.dataset=") for setting in overrides)


def _are_corruptions(threats: Sequence[Threat]) -> bool:
    return any(getattr(threat, "severity", None) is not None for threat in threats)


def _read_baselines(
    options: EvaluateOptions, threats: Sequence[Threat], shifts: Sequence[Shift]
) -> dict[str, Baseline | None]:
    """What mCE is against, by the name of each shift, and of the corruptions among the threats."""
    names = [shift.name for shift in shifts]
    if _are_corruptions(threats):
        names.append("corruptions")
    return {name: read_baseline(options.baseline, name) for name in names}


def _evaluate(job: _Job, threats: Sequence[Threat]) -> Report:
    """Clean images and threats."""
    at_most = any(isinstance(threat, Ensemble) for threat in threats)
    with Bar("evaluating", shown=job.process.first, at_most=at_most) as bar:
        return evaluate(
            job.target.model,
            job.loader(),
            threats,
            folder=job.folder,
            process=job.process,
            progress=bar,
            signature=data_settings(job.target.config.data),
        )


def _summarise_corruptions(job: _Job, report: Report, threats: Sequence[Threat]) -> ShiftReport | None:
    """`evaluate` has kept the summary of corruptions; against a baseline it is kept anew."""
    if not _are_corruptions(threats):
        return None
    baseline = job.baselines["corruptions"]
    found = corruption_report(report, baseline)
    if found is not None and baseline is not None and job.process.first:
        found.save(job.folder / "shifts" / found.name / "report.json")
    return found


def _examine(job: _Job, norm: Norm, eps: float) -> list[Finding]:
    with Bar("checking", shown=job.process.first) as bar:
        findings = examine(job.target.model, job.loader(), eps, norm=norm, progress=bar)
    save_findings(findings, job.folder / "sanity.json")
    return findings


def _evaluate_shift(job: _Job, shift: Shift, report: Report | None, temperature: float | None) -> ShiftReport:
    clean_error = None
    if report is not None:
        clean_error = 1 - report["clean"].accuracy
    with Bar(shift.name, shown=job.process.first) as bar:
        return evaluate_shift(
            job.target.model,
            shift,
            data=job.target.config.data,
            folder=job.folder / "shifts" / shift.name,
            process=job.process,
            progress=bar,
            temperature=temperature,
            baseline=job.baselines[shift.name],
            clean_error=clean_error,
        )
