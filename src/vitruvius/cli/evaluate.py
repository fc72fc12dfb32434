"""Evaluate and attack: accuracy image by image, and adversarial examples as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitruvius._errors import ConfigError

if TYPE_CHECKING:
    from vitruvius.evaluation import Report
    from vitruvius.evaluation.examples import ExampleScores
    from vitruvius.evaluation.metrics.corruption import Baseline
    from vitruvius.evaluation.shift_report import ShiftReport
    from vitruvius.evaluation.threats import Threat
    from vitruvius.request import Request

CORRUPTIONS = "corruptions"  # name of the summary of threats that are corruptions


@dataclass(kw_only=True)
class Evaluation:
    """What was found; no report where only shifts were asked for and no data was named."""

    report: Report | None = None
    corruptions: ShiftReport | None = None  # the summary of threats that are corruptions
    shifts: list[ShiftReport] = field(default_factory=list)


def evaluate(
    target: str,
    /,
    *overrides: str,
    threat: Sequence[str] = (),
    shift: Sequence[str] = (),
    baseline: str | None = None,
    calibrate: str | None = None,
    sanity: str | None = None,
    images: int | None = None,
    out: Path | None = None,
    fresh: bool = False,
    trust_plugins: bool = False,
    slurm: str | None = None,
) -> Evaluation:
    """Accuracy, clean, under threats and on shifted images, image by image.

    What an interrupted evaluation has judged is not judged again; threats asked for later join those that are done.

    Args:
        target: a run folder or a model name.
        overrides: settings such as data.root=/imagenet or data.eval_batch_size=64.
        threat: an attack or corruptions, e.g. pgd:eps=4/255,steps=10; may come again.
        shift: a published set of shifted images, e.g. imagenet-c:/data/imagenet-c; may come again.
        baseline: mCE against this run, evaluated under the same shifts, or against a published table: alexnet.
        calibrate: fit a temperature for shifts on this split; held-out: on what a run held out.
        sanity: also check for masked gradients at this strength, e.g. 8/255 or l2:0.5.
        images: judge N images of the validation split, a fixed random choice (default: all).
        out: folder for ledger and report (default: RUN/evaluation).
        fresh: delete what an earlier evaluation has left in that folder, and start again.
        trust_plugins: import the modules a run names under plugins:, which runs code.
        slurm: submit it instead, its tasks share the images, e.g. partition=gpu,gpus_per_node=8.
    """
    if slurm is not None:
        from vitruvius.evaluation.threats import make_threats
        from vitruvius.training.slurm import submit_evaluation

        for spec in threat:
            make_threats(spec, where="--threat")
        flags: dict[str, object] = {"threat": threat, "shift": shift, "baseline": baseline, "calibrate": calibrate}
        flags |= {"sanity": sanity, "images": images, "out": out, "fresh": fresh, "trust-plugins": trust_plugins}
        print(submit_evaluation([target, *overrides], flags, slurm))
        return Evaluation()
    from vitruvius.request import open_request

    if calibrate is not None and not shift:
        raise ConfigError("--calibrate fits a temperature for shifted images; name them with --shift, or leave it out.")
    data_needed = bool(threat or sanity or calibrate or not shift)  # shifts bring their own images
    with open_request(
        target,
        overrides,
        images=images,
        out=out,
        writes="evaluation",
        data_needed=data_needed,
        trust_plugins=trust_plugins,
    ) as request:
        from vitruvius.evaluation import evaluate_shift
        from vitruvius.evaluation.ledger import Ledger
        from vitruvius.evaluation.sanity import examine, read_ball, save_findings
        from vitruvius.evaluation.shift import check_fit, open_shifts, read_baseline, temperature_of
        from vitruvius.evaluation.threats import make_threats

        ball = read_ball(sanity)
        threats = [made for spec in threat for made in make_threats(spec, where="--threat")]
        if baseline is not None and not shift and not _corruptions_in(threats):
            raise ConfigError("--baseline compares errors on shifted images; name some with --shift, or leave it out.")
        shifts = open_shifts(shift, request.config.data)
        names = [*(opened.name for opened in shifts), *_corruptions_in(threats)]
        baselines = {name: read_baseline(baseline, name) for name in names}
        for opened in shifts:
            check_fit(request.model, opened)  # before hours go into what comes first
        folder = request.folder
        if fresh:
            for place in (folder, *(folder / "shifts").glob("*")):
                request.process.on_first(Ledger(place).clear)
        results = Evaluation()
        temperature, gap = None, ""  # between two parts, each printed as soon as it is known
        if calibrate is not None:
            with request.bar("fitting a temperature") as bar:
                temperature = temperature_of(request.target, calibrate, progress=bar)
        if data_needed or request.target.is_run or any(word.startswith("data.dataset=") for word in overrides):
            print(_judge_images(request, threats, baselines, results), flush=True)
            gap = "\n"
        if ball is not None and request.process.first:
            norm, eps = ball
            with request.bar("checking") as bar:
                findings = examine(request.model, request.loader, eps, norm=norm, progress=bar)
            save_findings(findings, request.folder / "sanity.json")
            print(gap + "\n".join(map(str, findings)), flush=True)
            gap = "\n"
        clean_error = None if results.report is None else 1 - results.report["clean"].accuracy
        for opened in shifts:
            with request.bar(opened.name) as bar:
                report = evaluate_shift(
                    request.model,
                    opened,
                    data=request.config.data,
                    folder=request.folder / "shifts" / opened.name,
                    process=request.process,
                    progress=bar,
                    temperature=temperature,
                    baseline=baselines[opened.name],
                    clean_error=clean_error,
                )
            results.shifts.append(report)
            print(f"{gap}{report}", flush=True)
            gap = "\n"
        request.save_config()
    return results


def _corruptions_in(threats: Sequence[Threat]) -> list[str]:
    """The name of their summary, if there are any."""
    return [CORRUPTIONS] if any(getattr(threat, "severity", None) is not None for threat in threats) else []


def _judge_images(
    request: Request, threats: Sequence[Threat], baselines: dict[str, Baseline | None], results: Evaluation
) -> str:
    """The report as text; `results` has it, and the summary of corruptions if there are some."""
    from vitruvius.attacks.base import Ensemble
    from vitruvius.evaluation import evaluate
    from vitruvius.evaluation.base import data_settings
    from vitruvius.evaluation.shift_report import corruption_report

    at_most = any(isinstance(threat, Ensemble) for threat in threats)
    with request.bar("evaluating", at_most=at_most) as bar:
        report = evaluate(
            request.model,
            request.loader,
            threats,
            folder=request.folder,
            process=request.process,
            progress=bar,
            signature=data_settings(request.config.data),
        )
    results.report = report
    lines = [str(report)]
    baseline = baselines.get(CORRUPTIONS)
    summary = results.corruptions = corruption_report(report, baseline) if CORRUPTIONS in baselines else None
    if summary is not None:
        lines.append(summary.means)
        if baseline is not None and request.process.first:  # without one `evaluate` has saved it
            summary.save(request.folder / "shifts" / CORRUPTIONS / "report.json")
    return "\n".join(lines)


def attack(
    target: str,
    /,
    *overrides: str,
    threat: str,
    out: Path,
    what: Literal["images", "perturbations"] = "images",
    images: int | None = None,
    trust_plugins: bool = False,
) -> Path:
    """Make adversarial examples once and keep them as a data set: a safetensors file, or a folder of pictures.

    An interrupted folder is finished by the same command.

    Args:
        target: a run folder or a model name.
        overrides: settings such as data.root=/imagenet or data.eval_batch_size=64.
        threat: an attack, e.g. pgd:eps=4/255,steps=10.
        out: a file *.safetensors (lossless), or a folder of 8-bit pictures.
        what: the attacked images, or their perturbations stretched to [0, 1] (default: images).
        images: attack N images of the validation split, a fixed random choice (default: all).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius.request import open_request

    is_file = out.suffix == ".safetensors"
    with open_request(
        target,
        overrides,
        images=images,
        out=out,
        writes="examples.safetensors" if is_file else "examples",
        trust_plugins=trust_plugins,
        alone=True,
    ) as request:
        from vitruvius.evaluation import make_threat
        from vitruvius.evaluation.examples import check_what, draw_examples, make_examples, save_examples

        made = make_threat(threat, where="--threat")
        check_what(made, what)
        model, loader, folder = request.model, request.loader, request.folder
        scores: ExampleScores
        with request.bar("attacking") as bar:
            if is_file:
                scores = examples = make_examples(model, loader, made, what=what, progress=bar)
                save_examples(examples, folder)
            else:
                scores = draw_examples(model, loader, made, folder, what=what, progress=bar)
    print(f"{scores.spec}: accuracy {scores.accuracy:.4f}, after rounding to 8 bits {scores.accuracy_8bit:.4f}")
    print(out)
    return out
