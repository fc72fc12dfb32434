"""evaluate: a model, a loader, some threats → a report; every image is judged once by every threat.

Threats run in rounds over the images, cheap ones first. An ensemble is given a pool of several batches at once; a kill
loses at most one of its stages on one pool. B images in a batch, K classes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._errors import DataError, VitruviusError
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._random import image_ids
from vitruvius._registry import Spec
from vitruvius.attacks.base import (
    ROBUST,
    Ensemble,
    Outcome,
    StageResult,
    check_hard_labels,
    check_inputs,
    check_moved,
    cost_of,
)
from vitruvius.evaluation.again import SecondOpinion
from vitruvius.evaluation.base import (
    DRAWS_RIGHT,
    Batch,
    Columns,
    NumberedLoader,
    answer,
    answer_draws,
    check_judged,
    numbered,
    subject_of,
)
from vitruvius.evaluation.ledger import AFTER, PIXELS, POINTS, STAGES, Ledger
from vitruvius.evaluation.masking import MaskingChecks, is_checked
from vitruvius.evaluation.result import Report, summarise
from vitruvius.evaluation.shift_report import corruption_report, load_shift_report
from vitruvius.evaluation.threats import Entry, Threat, by_spec, enter, is_foreign, make_threats, moved_by

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
    check_judged(model)
    process = process or Process(device=device_of(model))
    if threats is None or isinstance(threats, str | Mapping) or callable(threats):
        threats = [threats]
    named = by_spec([clean, *(threat for spec in threats for threat in make_threats(spec, where="threats"))])
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
        checked = any(map(is_checked, self.threats.values()))
        self.opinion = SecondOpinion(self.model) if checked else None  # before the model is asked anything
        self.news = logging.DEBUG if self.ledger.folder is None else logging.INFO

    def _count_images(self) -> int | None:
        number = getattr(self.loader, "num_images", None)
        if number is not None:
            return self.process.share_of(number)
        if isinstance(self.loader, list | tuple):
            labels = [batch[1] for batch in self.loader if isinstance(batch, list | tuple) and len(batch) > 1]
            return sum(map(len, labels)) if all(isinstance(y, Tensor) and y.ndim for y in labels) else None
        return None

    def rounds(self) -> list[dict[str, Threat]]:
        """Clean images and corruptions in one round over the images, then every attack in one of its own, cheap first.

        Images that can be read only once, or come in another order each time, get everything in one round.
        """
        if not isinstance(self.loader, NumberedLoader | Sequence):
            return [dict(self.threats)]
        threats = self.threats.items()
        light = {spec: t for spec, t in threats if t is clean or getattr(t, "severity", None) is not None}
        attacks = [(spec, threat) for spec, threat in threats if spec not in light]
        attacks.sort(key=lambda pair: (isinstance(pair[1], Ensemble), cost_of(pair[1]).total))
        return [light, *({spec: threat} for spec, threat in attacks)]

    def run(self) -> None:
        """Round after round over the images that have no row yet; what is known after each is logged at once.

        Clean images are read in any case, to see that they are the ones the ledger knows.
        """
        images = getattr(self.loader, "num_images", None)
        rounds = [
            threats
            for threats in self.rounds()
            if images is None or "clean" in threats or any(self.ledger.number(spec) != images for spec in threats)
        ]
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
        source = numbered(self.loader, self.process)
        while pool := tuple(itertools.islice(source, size)):
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
        check_inputs(x, y)
        check_hard_labels(y, "an evaluation")
        y = y.long()
        x, y, ids = self._each_once(x, y, ids)
        self.ledger.check_images(ids, x, y)
        self.checks.collect(x, y)
        return x, y, ids

    def _each_once(self, x: Tensor, y: Tensor, ids: Tensor) -> Batch:
        """Without images that come again under their id; other images under an id that was given are refused."""
        first: dict[int, int] = {}
        places = torch.tensor([first.setdefault(image, place) for place, image in enumerate(ids.tolist())])
        if len(first) == len(ids):
            return x, y, ids
        pixels = image_ids(x).cpu()
        other = (pixels[places] != pixels) | (y.cpu()[places] != y.cpu())
        if other.any():
            raise DataError(
                f"two images of a batch have the id {int(ids[other][0])}; each needs its own. Leave ids out, and "
                "images are numbered as they come."
            )
        kept = torch.tensor(list(first.values()))
        return x[kept.to(x.device)], y[kept.to(y.device)], ids[kept]

    def _check_repeated(self, x: Tensor, ids: Tensor, old: Tensor) -> None:
        """Refuse images that have come before under their id with other pixels."""
        differs = self.ledger.find("clean", ids[old])[PIXELS] != image_ids(x[old.to(x.device)]).cpu()
        if differs.any():
            raise DataError(
                f"image {int(ids[old][differs][0])} came before with other pixels; each needs an id of its own. Leave "
                "ids out, and images are numbered as they come."
            )

    def _look_for_masks(self) -> None:
        """Is there something about the model that an ensemble cannot cope with? Said before it begins."""
        for finding in self.checks.look(self.model):
            logger.log(self.news, "doubtful: %s: %s", finding.name, finding.sentence)

    def _judge_batches(self, spec: str, threat: Threat, batches: Sequence[Batch], progress: Progress) -> float:
        """Run one threat on the images it has not seen, and write down what the model answers; how many images."""
        images = sum(len(y) for _, y, _ in batches)
        before = 0
        for x, y, ids in batches:
            new = self.ledger.lacks(spec, ids)
            if spec == "clean" and not self.ledger.resumed and not new.all():
                self._check_repeated(x, ids, ~new)
            if new.any():
                begun = time.perf_counter()
                kept = new.to(x.device)
                x, y, ids = x[kept], y[kept], ids[new]
                batch_progress = scaled(part_of(progress, before, images - before - len(kept)), len(kept))
                moved = moved_by(threat, self.model, x, y, ids, batch_progress)
                rows = answer(self.model, moved, y)
                if is_checked(threat):
                    rows = self._asked_again(spec, (x, y, ids), moved, rows, len(y))
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

        def answers(images: Batch, moved: Tensor) -> Columns:
            rows = answer_draws(self.model, moved, images[1], batch_size, self.checks.draws(spec))
            return self._asked_again(spec, images, moved, rows, batch_size)

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
            outcome = ensemble.run(self.model, pool.x, pool.y, ids=pool.ids, batch_size=size, **extras)
            if is_foreign(ensemble):
                check_moved(ensemble, outcome.x, pool.x)
            pool.finish(outcome)
        return spent

    def _asked_again(self, spec: str, images: Batch, moved: Tensor, rows: Columns, batch_size: int) -> Columns:
        """Rows about x' `moved`, as a copy of the model sees them too; a random model is known to change its mind."""
        assert self.opinion is not None
        if self.checks.draws(spec) > 1:
            return rows
        x, y, ids = images
        clean = self.ledger.find("clean", ids)["prediction"].to(x.device)
        return self.opinion.judge(moved, x, y, clean, rows, batch_size)

    def _in_words(self, threats: Mapping[str, Threat], place: int) -> str:
        """A threat of a round, which of them it is, and its accuracy as far as that is known."""
        spec = list(threats)[place]
        words = _accuracy(self.ledger, spec) if self.ledger.number(spec) else spec
        return f"threat {place + 1} of {len(threats)}: {words}" if len(threats) > 1 else words

    def gather(self, entries: Sequence[Entry]) -> Report:
        """The rows of all processes as one report."""
        ledger, process = self.ledger, self.process
        if process.world_size > 1:
            ledger.join(process.gather(ledger.columns))
        data = str(getattr(self.loader, "name", "unnamed"))
        if not ledger.number("clean"):
            raise DataError(f"the loader {data!r} yielded no images; nothing to evaluate.")
        broken = {name for names in process.gather(list(getattr(self.loader, "broken", ()))) for name in names}
        remarks = [] if self.opinion is None else self.opinion.remarks()
        found = self.checks.gather(process)
        return summarise(ledger, entries, data, broken=sorted(broken), found=found, remarks=remarks)


class Pool:
    """The images that an ensemble is given together, their rows as its stages end, and how it resumes after a kill.

    What a stage breaks is final, so its rows go into the ledger when the stage ends; then it is noted which stages the
    pool is through with, and which images have fooled a faster view. The worst points of the first stage, which later
    searches start from and which the row of an image that nothing breaks is about, are written once.

    ledger, threat: where rows go. batch: images (B, …), labels (B,) and ids (B,), some of which may have rows already.
    answers: what the model says of some of them and their x'.
    """

    def __init__(self, ledger: Ledger, threat: str, batch: Batch, answers: Callable[[Batch, Tensor], Columns]) -> None:
        self.ledger = ledger
        self.threat = threat
        self.answers = answers
        self.pool = batch[2]
        self.x, self.y, self.ids = batch
        self.start = self._read()
        if self.start is None:
            self._take(ledger.lacks(threat, self.ids))
        self._clock = time.perf_counter()

    def write(self, outcome: Outcome) -> None:
        """A stage has ended: rows for what it has broken, then the note that the pool is through with it."""
        self._add_rows(outcome, (outcome.broken_by != ROBUST).cpu() & self._missing())
        if len(outcome.stages) == 2:
            row = outcome.robust.nonzero().squeeze(1)
            points = {"pool": self.pool, "row": row, "point": outcome.x[row]}
            self.ledger.write_pool(self.threat, POINTS, points, {})
        fooled = torch.zeros_like(outcome.robust) if outcome.view_fooled is None else outcome.view_fooled
        columns = {"pool": self.pool, "id": self.ids, "broken_by": outcome.broken_by, "view_fooled": fooled}
        about = {
            "stages": outcome.stages, "plan": outcome.plan,
            "view_error": outcome.view_error, "view_trusted": outcome.view_trusted,
        }  # fmt: skip
        self.ledger.write_pool(self.threat, STAGES, columns, about)

    def finish(self, outcome: Outcome) -> None:
        """All stages have ended: rows for the images that are left."""
        self._add_rows(outcome, self._missing())
        self.ledger.forget_pool(self.threat, self.pool)

    def _take(self, chosen: Tensor) -> None:
        """From now on only some of the images, (B,) bool on the CPU."""
        rows = chosen.to(self.x.device)
        self.x, self.y, self.ids = self.x[rows], self.y[rows], self.ids[chosen]

    def _missing(self) -> Tensor:
        """(B,) bool: images without a row."""
        return self.ledger.lacks(self.threat, self.ids)

    def _add_rows(self, outcome: Outcome, chosen: Tensor) -> None:
        if not chosen.any():
            return
        rows = chosen.to(self.x.device)
        columns = self.answers((self.x[rows], self.y[rows], self.ids[chosen]), outcome.x[rows])
        broken_by = outcome.broken_by.cpu()[chosen]
        if DRAWS_RIGHT in columns:  # another draw may be right where one was fooled
            columns["correct"] = columns["correct"].cpu() & (broken_by == ROBUST)
        now = time.perf_counter()
        seconds = torch.full((len(broken_by),), (now - self._clock) / len(broken_by))
        self._clock = now
        stood = outcome.robust_by_stage()
        if outcome.plan:
            stood = {label: outcome.robust | (outcome.broken_by > number) for number, label in enumerate(outcome.plan)}
        after = {f"{AFTER}{label}": robust.cpu()[chosen] for label, robust in stood.items()}
        about = {"id": self.ids[chosen], "label": self.y[rows], "seconds": seconds}
        self.ledger.add(self.threat, {**about, **columns, **after})

    def _read(self) -> Outcome | None:
        """What an interrupted ensemble has found about these images; None where it must begin with those without rows.

        It must begin where images were pooled otherwise, or where a file was damaged.
        """
        note = self.ledger.read_pool(self.threat, STAGES, self.pool)
        points = self.ledger.read_pool(self.threat, POINTS, self.pool)
        if note is None:
            return None
        columns, about = note
        chosen = torch.isin(self.pool, columns["id"])
        in_first_stage = len(about["stages"]) == 1
        if (points is None and not in_first_stage) or (self._missing() & ~chosen).any():
            return None
        broken_by, has_row = self._broken_by_rows(columns["id"], about["plan"])
        if ((columns["broken_by"] != ROBUST) & ~has_row).any():
            return None
        self._take(chosen)
        x = self.x.clone()
        if points is not None and not in_first_stage:
            x[points[0]["row"].to(x.device)] = points[0]["point"].to(x)
        return Outcome(
            x=x,
            broken_by=torch.where(has_row, broken_by, columns["broken_by"]).to(x.device),
            stages=tuple(StageResult(*stage) for stage in about["stages"]),
            plan=tuple(about["plan"]),
            view_fooled=columns["view_fooled"].to(x.device),
            view_error=about["view_error"],
            view_trusted=about["view_trusted"],
        )

    def _broken_by_rows(self, ids: Tensor, plan: list[str]) -> tuple[Tensor, Tensor]:
        """(n,) the stage that has broken each image by the rows of the ledger, and whether it has a row."""
        broken_by = torch.full_like(ids, ROBUST)
        rows = self.ledger.columns.get(self.threat)
        if rows is None:
            return broken_by, torch.zeros_like(ids, dtype=torch.bool)
        number = torch.stack([rows[f"{AFTER}{label}"] for label in plan]).sum(0)  # of stages that it stood
        stage = dict(zip(rows["id"].tolist(), number.tolist(), strict=True))
        found = torch.tensor([stage.get(image, len(plan)) for image in ids.tolist()])
        return torch.where(found < len(plan), found, ROBUST), torch.isin(ids, rows["id"])


def _news(ledger: Ledger, threats: Mapping[str, Threat]) -> dict[str, str]:
    """A sentence for each threat of a round; a corruption at several severities gets one for all of them."""
    families: dict[str, list[str]] = {}
    for spec in filter(ledger.number, threats):
        families.setdefault(re.sub(r"severity=\d+", "severity", spec), []).append(spec)
    news = {}
    for specs in families.values():
        severities = ", ".join(str(getattr(threats[spec], "severity", "")) for spec in specs)
        shares = ", ".join(f"{100 * ledger.correct(spec) / ledger.number(spec):.1f}" for spec in specs)
        several = f"{specs[0].partition('(')[0]} at severities {severities}: {shares} %"
        news[specs[0]] = several if specs[1:] else _accuracy(ledger, specs[0])
    return news


def _accuracy(ledger: Ledger, spec: str) -> str:
    """`clean 93.06 % (335 of 360 images)`, so far and of this process."""
    right, number = ledger.correct(spec), ledger.number(spec)
    return f"{spec} {100 * right / number:.2f} % ({right} of {number} images)"


def _save(ledger: Ledger, report: Report, folder: Path) -> None:
    ledger.save()
    report.save(folder / "report.json")
    shift = corruption_report(report)
    if shift is None:
        return
    file = folder / "shifts" / shift.name / "report.json"
    with contextlib.suppress(VitruviusError):  # not there, or damaged
        saved = load_shift_report(file)  # perhaps with errors against a baseline, which only a command knows
        if (saved.parts, saved.clean_error) == (shift.parts, shift.clean_error):
            return
    shift.save(file)
