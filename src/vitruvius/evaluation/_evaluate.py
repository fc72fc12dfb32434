"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

B images in a batch, K classes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_batch, check_eval_mode, device_of
from vitruvius._errors import DataError, VitruviusError
from vitruvius._processes import Process
from vitruvius._registry import Spec
from vitruvius.attacks import Ensemble, StageEvent, check_inputs, watched_by, work_of
from vitruvius.evaluation._judging import Batch, judge
from vitruvius.evaluation._progress import RoundProgress, step_progress
from vitruvius.evaluation._subject import subject_of
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.masking import MaskingChecks
from vitruvius.evaluation.result import Report, summarise
from vitruvius.evaluation.shift_report import ShiftReport, corruption_report, load_shift_report
from vitruvius.evaluation.threats import Entry, Threat, by_spec, enter, make_threats

ALONE = Process(device=torch.device("cpu"))


@runtime_checkable
class NumberedLoader(Protocol):
    """A loader that knows which image of the data set each one is."""

    def with_ids(self) -> Iterator[Batch]: ...


def clean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The identity threat: images as they are.

    `x` (B, C, H, W) is returned; `model` and `y` are not looked at.
    """
    return x


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    threats: Spec | Threat | Sequence[Spec | Threat] = (),
    *,
    folder: str | Path | None = None,
    process: Process | None = None,
    progress: Progress | None = None,
    on_news: Callable[[str], object] | None = None,
    signature: Mapping[str, object] | None = None,
) -> Report:
    """Accuracy on images as they are and under each threat, image by image.

    model: in eval mode; takes pixels in [0, 1] and returns logits (B, K).
    loader: batches (images, labels), or (images, labels, ids).
    threats: each `"pgd:eps=8/255"`, `{use: pgd, eps: 8/255}`, or a function (model, x, y) → x'; one alone as it is.
    folder: where the ledger is written as it grows: an interrupted evaluation goes on where it stopped, and threats
        asked for later join those that are done. Default: nothing is written.
    process: of several processes, this one; each brings its share of the images.
    progress: called after every batch, and as stages of an ensemble advance, with the images done, how many there are,
        and a few words.
    on_news: called with a sentence when an accuracy is known and when a stage of an ensemble has ended.
    signature: facts about the data that make an evaluation in the same folder another one.
    """
    check_eval_mode(model)
    process = process or Process(device=device_of(model))
    chosen = by_spec([clean, *_make_all(threats)])
    ledger = Ledger(folder, rank=process.rank)
    subject: dict[str, object] = {}
    if folder is not None:
        subject = {**subject_of(model, loader), **(signature or {})}
    try:
        entries = process.on_first(lambda: ledger.claim(subject, [enter(threat) for threat in chosen.values()]))
        ledger.read()
        job = _Job(
            model=model,
            loader=loader,
            threats=chosen,
            ledger=ledger,
            process=process,
            progress=progress,
            on_news=on_news,
            checks=MaskingChecks(chosen, folder, process.rank),
        )
        _judge_or_abandon(job)
        report = _gather(job, entries)
        if folder is not None:
            process.on_first(lambda: _keep(ledger, report, Path(folder)))
    finally:
        ledger.release()
    return report


def _has_labels(batch: Any) -> bool:
    """Whether a batch has images and labels to count; one that has not is refused when it is read."""
    return isinstance(batch, list | tuple) and len(batch) > 1


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A model, images, threats by their descriptions, and where results and news go."""

    model: nn.Module
    loader: Iterable[Any]
    threats: Mapping[str, Threat]
    ledger: Ledger
    process: Process
    progress: Progress | None
    on_news: Callable[[str], object] | None
    checks: MaskingChecks

    @property
    def total(self) -> int | None:
        """Images of this process, where the loader knows how many there are."""
        number = getattr(self.loader, "num_images", None)
        if number is not None:
            return len(range(self.process.rank, number, self.process.world_size))
        if isinstance(self.loader, list | tuple) and all(_has_labels(batch) for batch in self.loader):
            return sum(len(batch[1]) for batch in self.loader)
        return None

    def rounds(self) -> list[dict[str, Threat]]:
        """Clean images and corruptions in one round over the images, then every attack in one of its own, cheap first.

        Images that can be read only once, or come in another order each time, get everything in one round.
        """
        if not isinstance(self.loader, NumberedLoader | Sequence):
            return [dict(self.threats)]
        light = {spec: threat for spec, threat in self.threats.items() if _cost(threat) == 0}
        attacks = [(spec, threat) for spec, threat in self.threats.items() if spec not in light]
        attacks.sort(key=lambda pair: _cost(pair[1]))
        return [light, *({spec: threat} for spec, threat in attacks)]

    def is_done(self, threats: Mapping[str, Threat]) -> bool:
        """Whether the ledger has a row for every image of the data set under all of these threats.

        Clean images are read in any case, to see that they are the ones the ledger knows.
        """
        number = getattr(self.loader, "num_images", None)
        if number is None or "clean" in threats:
            return False
        return all(len(self.ledger.done(spec)) == number for spec in threats)


def _cost(threat: object) -> float:
    """Roughly how many passes of the model an image takes; 0 for clean images and corruptions."""
    if threat is clean or getattr(threat, "severity", None) is not None:
        return 0.0
    return work_of(threat).total


def _make_all(threats: Spec | Threat | Sequence[Spec | Threat]) -> list[Threat]:
    """The threats that their descriptions mean; one alone may be given as it is."""
    if isinstance(threats, str | Mapping) or callable(threats):
        threats = [threats]
    return [threat for spec in threats for threat in make_threats(spec, where="threats")]


def numbered(loader: Iterable[Any], process: Process = ALONE) -> Iterator[Batch]:
    """Batches with ids: the loader's own, else counted in order of arrival, every process for itself.

    `loader` yields (images, labels) or (images, labels, ids); `process` is this one of several (default: alone).
    """
    if isinstance(loader, NumberedLoader):
        yield from loader.with_ids()
        return
    start = 0
    for batch in loader:
        check_batch(batch)
        x, y, *rest = batch
        if rest:
            ids = _check_ids(rest[0], len(y))
        else:
            ids = torch.arange(start, start + len(y)) * process.world_size + process.rank
        start += len(y)
        yield x, y, ids


def _check_ids(ids: object, images: int) -> Tensor:
    """Refuse what does not number the images, such as the paths that some loaders yield; else the ids as they are."""
    said = type(ids).__name__
    if isinstance(ids, Tensor):
        if ids.shape == (images,) and not ids.is_floating_point():
            return ids
        said = f"{ids.dtype} {tuple(ids.shape)}"
    raise DataError(
        f"the third part of a batch is {said}; expected ids, a tensor of one whole number per image. Leave it out, and "
        "images are numbered as they come."
    )


def _gather(job: _Job, entries: Sequence[Entry]) -> Report:
    """The rows of all processes as one report."""
    ledger = job.ledger
    process = job.process
    if process.world_size > 1:
        ledger.join(process.gather(ledger.columns))
    data = str(getattr(job.loader, "name", "unnamed"))
    if not len(ledger.done("clean")):
        raise DataError(f"the loader {data!r} yielded no images; nothing to evaluate.")
    broken = {name for names in process.gather(list(getattr(job.loader, "broken", ()))) for name in names}
    return summarise(ledger, entries, data, broken=sorted(broken), found=job.checks.gather(process))


def _judge_or_abandon(job: _Job) -> None:
    """Judge everything; if nothing was judged before an error, the new folder goes."""
    try:
        _judge_all(job)
    except BaseException:
        job.ledger.abandon()
        raise


def _judge_all(job: _Job) -> None:
    """Round after round over the images, cheap threats first; what is known after each is told at once."""
    rounds = [threats for threats in job.rounds() if not job.is_done(threats)]
    for number, threats in enumerate(rounds, 1):
        place = ""
        if len(rounds) > 1:
            place = f"round {number} of {len(rounds)}, "
        _judge_round(job, threats, RoundProgress(job.progress, job.total, place))
        if job.on_news is not None:
            for line in _news(job, threats):
                job.on_news(line)


def _judge_round(job: _Job, threats: Mapping[str, Threat], round: RoundProgress) -> None:
    """Some threats on all images, batch by batch; an ensemble is given several batches at once."""
    ensembles = _ensembles(threats)
    size = max((ensemble.pool_batches for ensemble in ensembles.values()), default=1)
    round.at(0, _in_words(job, threats, 0))
    for pool in _batched(numbered(job.loader, job.process), size):
        checked = [_checked(batch, job.process) for batch in pool]
        _prepare(job, checked, attacked=bool(ensembles))
        images = sum(len(y) for _, y, _ in checked)
        for place, (spec, threat) in enumerate(threats.items()):
            words = _in_words(job, threats, place)
            round.at(round.done + images * place / len(threats), words)
            batches = checked
            if spec in ensembles:
                batches = [_joined(checked)]
            with watched_by(step_progress(round, images, words)):
                for batch in batches:
                    _judge(job, spec, threat, batch, len(checked[0][1]), round)
        round.end_pool(images)
        round.at(round.done, _in_words(job, threats, len(threats) - 1))
    _check_model(job)


def _judge(job: _Job, spec: str, threat: Threat, batch: Batch, batch_size: int, round: RoundProgress) -> None:
    """One threat on one batch; the events of an ensemble are progress, and the end of each of its stages is news."""
    name = spec.partition("(")[0]

    def tell(event: StageEvent) -> None:
        if event.finished and job.on_news is not None:
            robust = f"{event.robust} of {event.images} still robust"
            job.on_news(f"{name}: {event.stage} done ({event.number} of {event.stages}), {robust}")
        round.event(name, event, len(batch[1]))

    judge(job.model, spec, threat, batch, job.ledger, batch_size, tell, job.checks.draws(spec))


def _in_words(job: _Job, threats: Mapping[str, Threat], place: int) -> str:
    """A threat of a round, which of them it is, and its accuracy as far as that is known."""
    spec = list(threats)[place]
    words = spec
    if len(job.ledger.columns.get(spec, {}).get("correct", ())):
        words = _accuracy(job.ledger, spec)
    if len(threats) > 1:
        words = f"threat {place + 1} of {len(threats)}: {words}"
    return words


def _prepare(job: _Job, pool: Sequence[Batch], *, attacked: bool) -> None:
    """Are these the images that the ledger knows? Before an attack the model is checked on the first of them."""
    for x, y, ids in pool:
        job.ledger.check_images(ids, x, y)
        job.checks.collect(x, y)
    if attacked or job.checks.has_enough:
        _check_model(job)


def _check_model(job: _Job) -> None:
    """Before an ensemble begins: is there something about the model that it cannot cope with? Said at once."""
    for finding in job.checks.look(job.model):
        if job.on_news is not None:
            job.on_news(f"doubtful: {finding.name}: {finding.sentence}")


def _news(job: _Job, threats: Mapping[str, Threat]) -> Iterator[str]:
    """A line for each threat of a round; a corruption at several severities gets one for all of them."""
    families: dict[str, list[str]] = {}
    for spec in threats:
        families.setdefault(re.sub(r"severity=\d+", "severity", spec), []).append(spec)
    for specs in families.values():
        if len(specs) == 1:
            yield _accuracy(job.ledger, specs[0]) + job.checks.say(specs[0])
            continue
        severities = [str(getattr(threats[spec], "severity", "")) for spec in specs]
        shares = [100 * float(job.ledger.columns[spec]["correct"].float().mean()) for spec in specs]
        name = specs[0].partition("(")[0]
        yield f"{name} at severities {', '.join(severities)}: {', '.join(f'{share:.1f}' for share in shares)} %"


def _accuracy(ledger: Ledger, spec: str) -> str:
    """`clean 93.06 % (335 of 360 images)`, so far and of this process."""
    correct = ledger.columns[spec]["correct"]
    right = int(correct.sum())
    return f"{spec} {100 * right / len(correct):.2f} % ({right} of {len(correct)} images)"


def _ensembles(threats: Mapping[str, object]) -> dict[str, Ensemble]:
    """Those that are given several batches at once."""
    return {spec: threat for spec, threat in threats.items() if isinstance(threat, Ensemble)}


def _checked(batch: Batch, process: Process) -> Batch:
    x, y, ids = batch
    x, y, ids = x.to(process.device), y.to(process.device), ids.cpu()
    if y.ndim != 1:
        raise DataError(f"labels have shape {tuple(y.shape)}, expected one whole number per image.")
    check_inputs(x, y)
    return x, y.long(), ids


def _joined(batches: Sequence[Batch]) -> Batch:
    x, y, ids = (torch.cat(column) for column in zip(*batches, strict=True))
    return x, y, ids


def _batched(batches: Iterable[Batch], size: int) -> Iterator[tuple[Batch, ...]]:
    """itertools.batched, which Python 3.11 lacks."""
    source = iter(batches)
    while pool := tuple(itertools.islice(source, size)):
        yield pool


def _keep(ledger: Ledger, report: Report, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")
    found = corruption_report(report)
    if found is None:
        return
    file = folder / "shifts" / found.name / "report.json"
    if not _is_summarised(found, file):
        found.save(file)


def _is_summarised(found: ShiftReport, file: Path) -> bool:
    """Whether the same figures are there, perhaps with errors against a baseline, which only a command knows."""
    if not file.exists():
        return False
    try:
        known = load_shift_report(file)
    except VitruviusError:  # damaged: it is written anew
        return False
    return (known.parts, known.clean_error) == (found.parts, found.clean_error)
