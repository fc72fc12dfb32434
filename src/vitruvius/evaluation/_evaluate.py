"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

Threats run in rounds over the images, cheap ones first. An ensemble is given a pool of several batches at once; a kill
loses at most one of its stages on one pool. B images in a batch, K classes.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode, device_of
from vitruvius._errors import DataError, VitruviusError
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._random import image_ids
from vitruvius._registry import Spec
from vitruvius.attacks.base import Ensemble, Outcome, check_inputs, cost_of, disturb
from vitruvius.evaluation._pool import Pool
from vitruvius.evaluation.base import (
    Batch,
    Columns,
    NumberedLoader,
    answer,
    answer_draws,
    numbered,
    subject_of,
)
from vitruvius.evaluation.ledger import PIXELS, Ledger
from vitruvius.evaluation.masking import MaskingChecks
from vitruvius.evaluation.result import Report, summarise
from vitruvius.evaluation.shift_report import ShiftReport, corruption_report, load_shift_report
from vitruvius.evaluation.threats import Entry, Threat, by_spec, enter, make_threats

logger = logging.getLogger(__name__)


def clean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The identity threat: images as they are."""
    return x


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    threats: Spec | Threat | Sequence[Spec | Threat] = (),
    *,
    folder: str | Path | None = None,
    process: Process | None = None,
    progress: Progress = no_progress,
    signature: Mapping[str, object] | None = None,
) -> Report:
    """Accuracy on images as they are and under each threat, image by image.

    model: in eval mode; takes pixels in [0, 1] and returns logits (B, K).
    loader: batches (images, labels), or (images, labels, ids).
    threats: each `"pgd:eps=8/255"`, `{use: pgd, eps: 8/255}`, or a function (model, x, y) → x'; one alone as it is.
    folder: where the ledger is written as it grows: an interrupted evaluation resumes where it stopped, and threats
        asked for later join those that are done. Default: nothing is written.
    process: of several processes, this one; each brings its share of the images.
    progress: told how many images are done, of how many, and what is being done now. Under an ensemble, whose images
        drop out when they are broken, an image counts as much as the ensemble can spend on it at most. Accuracies and
        the ends of stages are logged as they become known.
    signature: facts about the data that make an evaluation in the same folder another one.
    """
    check_eval_mode(model)
    process = process or Process(device=device_of(model))
    named = by_spec([clean, *_make_all(threats)])
    ledger = Ledger(folder, rank=process.rank)
    subject: dict[str, object] = {}
    if folder is not None:
        subject = {**subject_of(model, loader), **(signature or {})}
    try:
        entries = process.on_first(lambda: ledger.claim(subject, [enter(threat) for threat in named.values()]))
        ledger.read()
        checks = MaskingChecks(named, folder, process.rank)
        evaluation = Evaluation(model, loader, named, ledger, process, progress, checks)
        try:
            evaluation.run()
        except BaseException:
            ledger.abandon()
            raise
        report = evaluation.gather(entries)
        if folder is not None:
            process.on_first(lambda: _save(ledger, report, Path(folder)))
    finally:
        ledger.release()
    return report


def _make_all(threats: Spec | Threat | Sequence[Spec | Threat]) -> list[Threat]:
    """The threats that their descriptions mean; one alone may be given as it is."""
    if isinstance(threats, str | Mapping) or callable(threats):
        threats = [threats]
    return [threat for spec in threats for threat in make_threats(spec, where="threats")]


@dataclass
class Evaluation:
    """A model, images, threats by their descriptions, and where results go."""

    model: nn.Module
    loader: Iterable[Any]
    threats: Mapping[str, Threat]
    ledger: Ledger
    process: Process
    progress: Progress
    checks: MaskingChecks

    def __post_init__(self) -> None:
        self.total = self._count_images()  # of this process; None where the loader does not know
        self.news = logging.DEBUG if self.ledger.folder is None else logging.INFO

    def _count_images(self) -> int | None:
        number = getattr(self.loader, "num_images", None)
        if number is not None:
            return len(range(self.process.rank, number, self.process.world_size))
        if isinstance(self.loader, list | tuple) and all(
            isinstance(b, list | tuple) and len(b) > 1 for b in self.loader
        ):
            return sum(len(batch[1]) for batch in self.loader)
        return None

    def rounds(self) -> list[dict[str, Threat]]:
        """Clean images and corruptions in one round over the images, then every attack in one of its own, cheap first.

        Images that can be read only once, or come in another order each time, get everything in one round.
        """
        if not isinstance(self.loader, NumberedLoader | Sequence):
            return [dict(self.threats)]
        light = {spec: threat for spec, threat in self.threats.items() if _is_light(threat)}
        attacks = [(spec, threat) for spec, threat in self.threats.items() if spec not in light]
        attacks.sort(key=lambda pair: (isinstance(pair[1], Ensemble), cost_of(pair[1]).total))
        return [light, *({spec: threat} for spec, threat in attacks)]

    def _is_done(self, threats: Mapping[str, Threat]) -> bool:
        """Whether the ledger has a row for every image of the data set under all of these threats.

        Clean images are read in any case, to see that they are the ones the ledger knows.
        """
        number = getattr(self.loader, "num_images", None)
        if number is None or "clean" in threats:
            return False
        return all(len(self.ledger.done(spec)) == number for spec in threats)

    def run(self) -> None:
        """Round after round over the images; what is known after each is logged at once."""
        rounds = [threats for threats in self.rounds() if not self._is_done(threats)]
        for number, threats in enumerate(rounds, 1):
            self._run_round(threats, f"round {number} of {len(rounds)}" if len(rounds) > 1 else "")
            for spec, sentence in _news(self.ledger, threats).items():
                logger.log(self.news, "%s%s", sentence, self.checks.say(spec))

    def _run_round(self, threats: Mapping[str, Threat], name: str) -> None:
        """Some threats on all images, batch by batch; an ensemble is given several batches at once."""
        ensembles: list[Any] = [threat for threat in threats.values() if isinstance(threat, Ensemble)]
        alone = bool(ensembles) and len(threats) == 1  # then images count as what was spent on them
        size = max((ensemble.pool_batches for ensemble in ensembles), default=1)
        watched = part_of(self.progress, 0, 0, name)
        watched(0, self.total, self._in_words(threats, 0))
        seen, work = 0, 0.0  # images, and what they count
        for pool in _batched(numbered(self.loader, self.process), size):
            batches = [self._checked(batch) for batch in pool]
            if ensembles or self.checks.has_enough:
                self._look_for_masks()
            images = sum(len(y) for _, y, _ in batches)
            later = None if self.total is None else max(self.total - seen - images, 0) * (work / seen if seen else 1.0)
            share = images / len(threats)
            for place, (spec, threat) in enumerate(threats.items()):
                after = None if later is None else later + images - (place + 1) * share
                progress = part_of(watched, work + place * share, after, self._in_words(threats, place))
                progress = progress if alone else scaled(progress, share)
                judge = self._judge_pool if isinstance(threat, Ensemble) else self._judge_batches
                spent = judge(spec, threat, batches, progress)
            seen += images
            work += spent if alone else images
            watched(work, None if later is None else work + later, self._in_words(threats, len(threats) - 1))
        self._look_for_masks()

    def _checked(self, batch: Batch) -> Batch:
        """Are these images and labels, and those that the ledger knows?"""
        x, y, ids = batch
        x, y, ids = x.to(self.process.device), y.to(self.process.device), ids.cpu()
        if y.ndim != 1:
            raise DataError(f"labels have shape {tuple(y.shape)}, expected one whole number per image.")
        check_inputs(x, y)
        y = y.long()
        self.ledger.check_images(ids, x, y)
        self.checks.collect(x, y)
        return x, y, ids

    def _look_for_masks(self) -> None:
        """Is there something about the model that an ensemble cannot cope with? Said before it begins."""
        for finding in self.checks.look(self.model):
            logger.log(self.news, "doubtful: %s: %s", finding.name, finding.sentence)

    def _judge_batches(self, spec: str, threat: Threat, batches: Sequence[Batch], progress: Progress) -> float:
        """Run one threat on the images it has not seen, and write down what the model answers; how many images."""
        images = sum(len(y) for _, y, _ in batches)
        before = 0
        for x, y, ids in batches:
            new = ~torch.isin(ids, self.ledger.done(spec))
            if new.any():
                begun = time.perf_counter()
                kept = new.to(x.device)
                x, y, ids = x[kept], y[kept], ids[new]
                batch_progress = scaled(part_of(progress, before, images - before - len(kept)), len(kept))
                moved = disturb(threat, self.model, x, y, ids, batch_progress)
                rows = answer(self.model, moved, y)
                if spec == "clean":
                    rows[PIXELS] = image_ids(x)
                seconds = torch.full_like(rows["loss"], (time.perf_counter() - begun) / len(y))
                self.ledger.add(spec, {"id": ids, "label": y, "seconds": seconds, **rows})
            before += len(new)
        return images

    def _judge_pool(self, spec: str, ensemble: Any, batches: Sequence[Batch], progress: Progress) -> float:
        """Run an ensemble on the images of several batches; what was spent on them, as it has told its progress."""
        batch_size = len(batches[0][1])
        spent = 0.0

        def tell(done: float, total: float | None, text: str = "", /) -> None:
            nonlocal spent
            spent = done
            progress(done, total, text)

        def answers(x: Tensor, y: Tensor) -> Columns:
            return answer_draws(self.model, x, y, batch_size, self.checks.draws(spec))

        def on_stage(outcome: Outcome) -> None:
            pool.write(outcome)
            number = len(outcome.stages) - 1
            if number:
                stage = f"{outcome.stages[number].label} done ({number} of {len(outcome.plan) - 1})"
                robust = f"{int(outcome.robust.sum())} of {len(outcome.x)} still robust"
                logger.log(self.news, "%s: %s, %s", spec.partition("(")[0], stage, robust)

        x, y, ids = (torch.cat(column) for column in zip(*batches, strict=True))
        pool = Pool(self.ledger, spec, (x, y, ids), answers)
        if len(pool.ids):
            optional = {"progress": tell, "on_stage": on_stage, "start": pool.start}
            taken = inspect.signature(ensemble.run).parameters
            extras: dict[str, Any] = {name: value for name, value in optional.items() if name in taken}
            size = ensemble.batch_size or batch_size
            pool.finish(ensemble.run(self.model, pool.x, pool.y, ids=pool.ids, batch_size=size, **extras))
        return spent

    def _in_words(self, threats: Mapping[str, Threat], place: int) -> str:
        """A threat of a round, which of them it is, and its accuracy as far as that is known."""
        spec = list(threats)[place]
        words = _accuracy(self.ledger, spec) if len(self.ledger.done(spec)) else spec
        return f"threat {place + 1} of {len(threats)}: {words}" if len(threats) > 1 else words

    def gather(self, entries: Sequence[Entry]) -> Report:
        """The rows of all processes as one report."""
        ledger, process = self.ledger, self.process
        if process.world_size > 1:
            ledger.join(process.gather(ledger.columns))
        data = str(getattr(self.loader, "name", "unnamed"))
        if not len(ledger.done("clean")):
            raise DataError(f"the loader {data!r} yielded no images; nothing to evaluate.")
        broken = {name for names in process.gather(list(getattr(self.loader, "broken", ()))) for name in names}
        return summarise(ledger, entries, data, broken=sorted(broken), found=self.checks.gather(process))


def _is_light(threat: object) -> bool:
    """Clean images and corruptions."""
    return threat is clean or getattr(threat, "severity", None) is not None


def _news(ledger: Ledger, threats: Mapping[str, Threat]) -> dict[str, str]:
    """A sentence for each threat of a round; a corruption at several severities gets one for all of them."""
    families: dict[str, list[str]] = {}
    for spec in filter(ledger.columns.__contains__, threats):
        families.setdefault(re.sub(r"severity=\d+", "severity", spec), []).append(spec)
    news = {}
    for first, *others in families.values():
        if not others:
            news[first] = _accuracy(ledger, first)
            continue
        specs = [first, *others]
        severities = [str(getattr(threats[spec], "severity", "")) for spec in specs]
        shares = [f"{100 * float(ledger.columns[spec]['correct'].float().mean()):.1f}" for spec in specs]
        name = first.partition("(")[0]
        news[first] = f"{name} at severities {', '.join(severities)}: {', '.join(shares)} %"
    return news


def _accuracy(ledger: Ledger, spec: str) -> str:
    """`clean 93.06 % (335 of 360 images)`, so far and of this process."""
    correct = ledger.columns[spec]["correct"]
    right = int(correct.sum())
    return f"{spec} {100 * right / len(correct):.2f} % ({right} of {len(correct)} images)"


def _batched(batches: Iterable[Batch], size: int) -> Iterator[tuple[Batch, ...]]:
    """itertools.batched, which Python 3.11 lacks."""
    source = iter(batches)
    while pool := tuple(itertools.islice(source, size)):
        yield pool


def _save(ledger: Ledger, report: Report, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")
    shift = corruption_report(report)
    if shift is None:
        return
    file = folder / "shifts" / shift.name / "report.json"
    if not _is_summarised(shift, file):
        shift.save(file)


def _is_summarised(shift: ShiftReport, file: Path) -> bool:
    """Whether the same figures are there, perhaps with errors against a baseline, which only a command knows."""
    if not file.exists():
        return False
    try:
        saved = load_shift_report(file)
    except VitruviusError:  # damaged: it is written again
        return False
    return (saved.parts, saved.clean_error) == (shift.parts, shift.clean_error)
