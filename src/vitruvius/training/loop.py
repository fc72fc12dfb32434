"""Training: a recipe becomes a run folder. The whole program, from epoch to batch to update to checkpoint.

`train` opens what a run works with (session.py) and its folder, and `Trainer.run` is the loop. What is special is
called from there by name: recorded steps (fast_step.py), sharding and batch norms of several processes
(parallel.py), the alarm for catastrophic overfitting (alarm.py), the choice of the best weights (selection.py),
states and files (checkpoint.py).
"""

from __future__ import annotations

import inspect
import json
import logging
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from rich.console import Console
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn

from vitruvius._errors import DataError, Diverged, Preempted
from vitruvius._processes import process_group
from vitruvius._progress import Bar, Progress, no_progress
from vitruvius._random import batch_seed, preserve_rng, seed_batch
from vitruvius._registry import load_plugins, read_spec
from vitruvius._secrets import redact
from vitruvius._signals import CODES, ENDING, GRACE, LONGEST, on_interrupt, set_grace_period
from vitruvius._yaml import to_plain
from vitruvius.analysis.analysing import ask_all
from vitruvius.analysis.callback import AnalysisCallback, first_images, rows_with_analyses
from vitruvius.compression.files import load_maps, load_masks
from vitruvius.compression.gradual import GradualMask
from vitruvius.init import inits
from vitruvius.tracking.base import Trackers
from vitruvius.training.alarm import Alarm, RolledBack
from vitruvius.training.checkpoint import Checkpoint
from vitruvius.training.config import Config, Recipe, as_config
from vitruvius.training.fast_step import make_fast_step
from vitruvius.training.losses import LossWatch, Means, all_finite, is_finite
from vitruvius.training.parallel import load_statistics, statistics_of
from vitruvius.training.run_folder import Run
from vitruvius.training.selection import Selection
from vitruvius.training.session import Session, describe_session, open_session

logger = logging.getLogger(__name__)

LOOK_EVERY = 10  # batches; looking waits for the device
LOOK_SECONDS = 5.0  # a process that trains alone looks at least so often, so that slow batches are seen one by one
REMEDY = "Lower train.lr, lengthen train.warmup_epochs, set train.clip_grad, or use train.precision=bf16."
Numbers = dict[str, Tensor]


class Callback(Protocol):
    """Called after every epoch, on the first process, when its files are written.

    `epoch` counts from 0; `model` is the one that is evaluated, in eval or train mode.
    """

    def epoch_end(self, epoch: int, model: nn.Module) -> object: ...


def train(
    config: Recipe,
    overrides: Iterable[str] = (),
    *,
    quiet: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train as a recipe says; the run folder. Called again with the same recipe, it resumes where it stopped.

    config: the recipe: the name of a packaged one ("digits/softmax"), the path of a YAML file, a mapping with the
    sections of a recipe, or a Config. overrides: settings such as "train.epochs=20" or "out=runs/mine" on top of it;
    none by default. quiet: show no progress; false by default. console: the rich console that shows it, by default
    standard error. callbacks: objects with `epoch_end(epoch, model)`, called on the first process after every epoch;
    none by default.

    Without `out`, a file trains into runs/<its name>, a mapping into runs/unnamed. Of a remote run (`out: s3://…`) the
    folder is its local copy.
    """
    config = as_config(config, overrides)
    load_plugins(config.plugins)
    run, trackers = Run(config.out or "runs/unnamed"), Trackers.of(config.tracking)
    with (
        process_group(config.train.device) as process,
        preserve_rng(process.device),
        listening() as stop,
        on_interrupt(run.describe_kept, run.abandon),
        Bar("training", shown=process.first and not quiet, console=console) as bar,
    ):
        bar(0, None, "opening data and model")
        # what can be wrong is found before a file is written
        shared = process.on_first(lambda: run.resumed(config, process.world_size))
        session = open_session(shared, process, fresh=not process.on_first(run.has_state))
        for line in describe_session(session):
            logger.info("%s", line)
        checkpoint, selection = Checkpoint(session, run), Selection(session)
        trainer = Trainer(
            session,
            checkpoint=checkpoint,
            alarm=Alarm.of(session, checkpoint, selection),
            selection=selection,
            gradual=gradual_of(session),
            stop=stop,
            progress=bar,
        )
        process.on_first(lambda: run.begin(with_batches_of(config, session.config)))
        try:
            checkpoint.resume()
            if session.updates:
                logger.info("resuming at epoch %d, after %s updates", session.epoch + 1, f"{session.updates:,}")
            if process.first:
                # trackers come after the analyses, whose answers they show
                trainer.callbacks = [*analyses_of(session, run), Tracking(session, run, trackers), *callbacks]
                rows = rows_with_analyses(session.rows, run.folder)
                trackers.open(run.folder, redact(to_plain(session.config)), rows)
            trainer.run()
        except BaseException as error:
            if process.first:
                run.abandon()
            if stop.asked and isinstance(error, RuntimeError):  # workers that died of the same signal
                raise preempted(stop, run.describe_kept()) from error
            raise
        else:
            trackers.close()  # which writes what it still has
            process.on_first(lambda: run.push(required=True))
        finally:
            trackers.close()
            run.release()
    return run.folder


def check_run(config: Config) -> None:
    """Do all that `train` does before it writes a file, and nothing else: what would fail there fails here.

    An init that is optimised takes one step, and low rank is not calibrated: only settings and sites are of interest.
    """
    load_plugins(config.plugins)
    Trackers.of(config.tracking)
    ask_all(config.analyses)
    run = Run(config.out or "runs/unnamed")
    with process_group(config.train.device) as process, preserve_rng(process.device):
        quick = replace(config, data=replace(config.data, cache="none"), init=with_one_step(config.init))
        session = open_session(quick, process, fresh=False)
        Alarm.of(session, Checkpoint(session, run), Selection(session))
        gradual_of(session)
        run.check(replace(session.config, data=config.data, init=config.init))


def with_batches_of(asked: Config, config: Config) -> Config:
    """A resolved recipe with the batches that were asked for, whichever processes share them out now."""
    data = replace(config.data, batch_size=asked.data.batch_size)
    train = replace(config.train, grad_accum_steps=asked.train.grad_accum_steps)
    return replace(config, data=data, train=train)


def with_one_step(init: Any) -> Any:
    """An init that makes a number of `steps`, with one of them; any other as it is."""
    if not init:
        return init
    name, settings = read_spec(init, where="init")
    if name not in inits or "steps" not in inspect.signature(inits.get(name, where="init")).parameters:
        return init
    steps = settings.get("steps", 1)
    if not isinstance(steps, int) or steps < 1:
        return init  # refused, as it will be
    return {"use": name, **settings, "steps": 1}


def analyses_of(session: Session, run: Run) -> list[AnalysisCallback]:
    """What the recipe asks of fixed images after epochs, the first of which are done; a list of one, or of none."""
    config = session.config
    if not config.analyses:
        return []
    batches = {
        name: first_images(loader, config.train.analyse_images)
        for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
    }
    callback = AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=run.folder)
    callback.forget(session.epoch)
    if session.batch == 0 and session.epoch > 0 and session.replica is None:  # a kill may have cut the last answer
        callback.epoch_end(session.epoch - 1, session.eval_model())
    return [callback]


class Tracking:
    """Shows the trackers all rows so far, with the answers of the analyses."""

    def __init__(self, session: Session, run: Run, trackers: Trackers) -> None:
        self.session, self.run, self.trackers = session, run, trackers

    def epoch_end(self, epoch: int, model: nn.Module) -> None:
        self.trackers.log(rows_with_analyses(self.session.rows, self.run.folder))


class Stop:
    """Whether a signal has asked the run to save and end, which it does after the update at hand."""

    name, asked = "", False

    def __call__(self, number: int, frame: object = None) -> None:
        """As a signal handler: only remember."""
        self.name, self.asked = signal.Signals(number).name, True


@contextmanager
def listening() -> Iterator[Stop]:
    """Catch the signals inside; the handlers of before come back. Threads cannot listen, they just train."""
    stop = Stop()
    numbers = ENDING if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def preempted(stop: Stop, kept: str) -> Preempted:
    """What a run ends with that was asked to; its exit code says whether the time was over."""
    error = Preempted(f"{stop.name or 'a signal to another process'}: {kept}")
    if stop.asked:
        error.exit_code = CODES[signal.Signals[stop.name]]
    return error


@dataclass
class Trainer:
    """The loop over epochs, batches and updates of a session, and who takes part in it: by default nobody."""

    session: Session
    checkpoint: Checkpoint | None = None
    alarm: Alarm | None = None
    selection: Selection | None = None
    gradual: GradualMask | None = None
    callbacks: Sequence[Callback] = ()
    stop: Stop = field(default_factory=Stop)
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        self.batches = len(self.session.train_loader)
        self.losses = LossWatch(self.session.process)
        self.ids = torch.zeros(0)  # of the images of this batch
        self.saved_at = time.monotonic()
        self.answered_at: float | None = None  # seconds of this epoch when a signal could last be answered
        self.first_batch_done = False

    # epochs

    def run(self) -> None:
        """Until the last epoch is done."""
        session = self.session
        self.make_fast_step()
        while session.epoch < session.num_epochs:
            self.show(f"batch {session.batch:,} of {self.batches:,}")
            set_masks(session, self.gradual)
            try:
                row = {"epoch": session.epoch, **self.train_epoch(), **self.judge()}
            except RolledBack:
                self.make_fast_step()  # recordings hold the state that was left
                continue
            self.end_epoch(row)
            model = session.eval_model()  # every process must ask
            if session.process.first:
                for callback in self.callbacks:
                    callback.epoch_end(session.epoch - 1, model)
                if self.checkpoint is not None:
                    self.checkpoint.run.push()
            if session.epoch < session.num_epochs and session.process.any(self.stop.asked):
                self.leave()

    def train_epoch(self) -> dict[str, float]:
        """Train on the batches that are left of this epoch; the means over the whole of it."""
        session = self.session
        session.task.train()
        session.train_loader.set_epoch(session.epoch, session.batch)
        before, start = session.elapsed, time.perf_counter()
        looked_at = start
        for number, (x, y, ids) in enumerate(session.train_loader.every_batch(), session.batch):
            updates, session.rate = session.updates, session.optimizer.param_groups[0]["lr"]
            self.train_on(x, y, ids, number)
            session.batch, session.elapsed = number + 1, before + time.perf_counter() - start
            regular = (number + 1) % LOOK_EVERY == 0 or number == self.batches - 1
            slow = session.process.world_size == 1 and time.perf_counter() - looked_at >= LOOK_SECONDS
            if regular or slow:
                looked_at = time.perf_counter()
                self.raise_if_nonfinite()
                means = session.means.read(fold=regular)
                session.elapsed = before + time.perf_counter() - start  # the device has done all that counts
                if means:
                    loss, share, rate = means["loss"], 100 * means["accuracy"], means["images"] / session.elapsed
                    self.show(f"loss {loss:.3f}, accuracy {share:.1f} %, {rate:,.0f} images/s")
            if self.ends_group(number):
                self.after_update(updates, looked=regular or slow)
        return self.means_of_epoch()

    def means_of_epoch(self) -> dict[str, float]:
        """The row of an epoch as far as training goes."""
        session = self.session
        means = session.means.read(fold=True)
        if not means:
            raise Diverged(f"every batch of epoch {session.epoch + 1} was left out: no loss was a number. {REMEDY}")
        # the last update may have made weights non-finite without a loss that shows it
        if not all_finite(session.process, [p.detach() for p in session.model.parameters()]):
            raise Diverged(f"weights are no longer finite after epoch {session.epoch + 1}. {REMEDY}")
        images = means.pop("images")
        row = {f"train_{name}": value for name, value in means.items()}
        if session.config.train.nonfinite == "skip":
            row["skipped_updates"] = session.skipped
        seconds = session.elapsed
        return row | {"lr": session.rate, "seconds": seconds, "images_per_second": images / seconds}

    def judge(self) -> dict[str, float]:
        """What images that are not trained on say of the epoch: the alarm, and what chooses the best weights."""
        session, train, task, row = self.session, self.session.config.train, self.session.task, {}
        session.agree_on_statistics()
        set_grace_period(LONGEST)  # an epoch is worth waiting for
        # a resumed run may begin here
        task.at(epoch=session.epoch, update=max(session.updates - 1, 0), updates_per_epoch=session.updates_per_epoch)
        last = session.epoch + 1 == session.num_epochs
        # the final ball does not choose before training has reached it, unless the run ends so
        grown = last or train.select_threat is not None or task.threat is None or task.radius == task.threat[1]
        if self.selection is not None and (last or (session.epoch + 1) % train.evaluate_every == 0):
            row = self.selection.judge(self.judging, attacking=grown)
        if self.alarm is not None:  # which uses what the selection has attacked
            row = {**self.alarm.check(), "alarms": session.alarms, "rollbacks": session.rollbacks, **row}
        return row

    def judging(self, done: float, total: float | None, text: str = "", /) -> None:
        """Between two batches of held-out images: a signal saves the epoch, which is judged when the run resumes.

        Several processes finish judging, since they would have to agree at every batch.
        """
        self.show(f"judging the {self.held_out} images")
        if self.stop.asked and self.session.process.world_size == 1:
            self.save()
            self.leave()

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Count the epoch, move a schedule that goes by epochs, see whether these weights are the best, and save."""
        session = self.session
        final = self.gradual is None or self.gradual.finished(session.epoch)
        session.rows.append(row)
        session.epoch, session.batch, session.elapsed, session.skipped = session.epoch + 1, 0, 0.0, 0
        session.means = Means(session.process)
        if session.scheduler is not None:
            metric = None if self.selection is None else row.get(f"val_{self.selection.key}")
            session.scheduler.step(session.epoch, metric)
        if self.selection is not None and final:  # weights trained with looser masks than the final ones are never best
            self.selection.choose(row)
        if self.checkpoint is not None:
            self.checkpoint.save(ended=True)
        set_grace_period(GRACE)
        if session.process.first:
            before = session.rows[-2].get("alarms", 0) if len(session.rows) > 1 else 0
            logger.info("%s", describe_epoch(row, session.num_epochs, self.held_out, alarms_before=before))

    # batches

    def train_on(self, x: Tensor, y: Tensor, ids: Tensor, number: int) -> None:
        """`train_batch` with the random numbers of this batch; a non-finite loss is reported with its images."""
        session, process, seed = self.session, self.session.process, self.session.config.seed
        if not len(x):
            self.pass_over(number)
            return
        seed_batch(seed=seed, epoch=session.epoch, batch=number, rank=process.rank, device=process.device)
        session.task.draws.begin(batch_seed(seed=seed, epoch=session.epoch, batch=number), process.device)
        start = time.perf_counter()
        if not self.first_batch_done and self.compiles:
            logger.info("compiling the model for the first batch")
            self.show("compiling the model for the first batch")
        self.ids = ids
        numbers = self.train_batch(x.to(process.device), y.to(process.device), number)
        if not self.first_batch_done:
            with_compiling = ", compiling included" if self.compiles else ""
            logger.info("first batch: %.1f s%s", time.perf_counter() - start, with_compiling)
            self.first_batch_done = True
        if numbers is not None:
            session.means.add(numbers, len(x))
            self.losses.add(number, numbers["loss"], ids)

    def train_batch(self, x: Tensor, y: Tensor, number: int) -> Numbers | None:
        """What the task reports of a batch, a mean over its replays; None for one that was left out.

        A task with `replays` is given the same batch that many times in a row, each with an update of its own (free
        adversarial training).
        """
        session = self.session
        labels = y
        if session.mixer is not None:
            x, y = session.mixer(x, y, epoch=session.epoch, step=number)
        reports = []
        for _ in range(session.task.replays):
            session.task.at(epoch=session.epoch, update=session.updates, updates_per_epoch=session.updates_per_epoch)
            if session.fast_step is not None:  # perhaps a recording: the same work in the same order
                report: Numbers | None = session.fast_step(x, y, labels, settings=session.task.recording_key())
                self.advance()
            elif session.config.train.nonfinite == "skip":
                report = self.forward_backward_or_skip(x, y, labels, number)
            else:
                report = report_of(self.forward_backward(x, y, number), labels)
                if self.ends_group(number):
                    self.update()
            if report is not None:
                reports.append(report)
        if len(reports) <= 1:
            return reports[0] if reports else None
        return {name: torch.stack([report[name] for report in reports]).mean(0) for name in reports[0]}

    def forward_backward(self, x: Tensor, y: Tensor, number: int) -> Numbers:
        """The task's answer to a batch, after its backward pass; gradients gather until their group is whole."""
        session, every = self.session, self.session.config.train.grad_accum_steps
        group = min(every, self.batches - number // every * every)  # the last group may be smaller
        if x.device.type != "cpu":  # what CUDA graphs gave for the last batch may be written over
            torch.compiler.cudagraph_mark_step_begin()
        with nullcontext() if self.ends_group(number) else session.task.no_sync():
            with session.autocast():
                result: Numbers = session.task(x, y)
            # looking at every loss costs nothing where one process trains on a CPU
            looks = session.process.world_size == 1 and session.process.device.type == "cpu"
            if looks and session.config.train.nonfinite == "stop" and not is_finite(session.process, result["loss"]):
                self.losses.add(number, result["loss"], self.ids)
                self.raise_if_nonfinite()  # before it has reached the weights
            session.scaler.scale(result["loss"] / group).backward()
        return result

    def forward_backward_or_skip(self, x: Tensor, y: Tensor, labels: Tensor, number: int) -> Numbers | None:
        """`nonfinite: skip`: a batch whose loss is not finite leaves no trace in statistics, weights or numbers."""
        session = self.session
        statistics = [buffer.clone() for buffer in statistics_of(session.model)]
        result = self.forward_backward(x, y, number)
        finite = is_finite(session.process, result["loss"])
        if not finite:
            load_statistics(session.model, statistics)
            session.group_nonfinite = True
        if self.ends_group(number):
            self.update()
        return report_of(result, labels) if finite else None

    def pass_over(self, number: int) -> None:
        """A batch of which no image could be read: an update that follows is made of what has gathered, and counted."""
        session, process = self.session, self.session.process
        if process.world_size > 1:
            raise DataError(
                f"none of the images of batch {number + 1} of process {process.rank + 1} of {process.world_size} could "
                "be read, and the other processes wait for its gradients. Repair or remove them, or use larger batches."
            )
        if not self.ends_group(number):
            return
        for _ in range(session.task.replays):
            # a fast step uses its gradients at once
            if session.fast_step is None and self.gradients():
                self.update()
            else:
                self.advance()

    def ends_group(self, number: int) -> bool:
        """Whether an update follows this batch."""
        return (number + 1) % self.session.config.train.grad_accum_steps == 0 or number == self.batches - 1

    # updates

    def update(self) -> None:
        """Gradients into the weights, unless they are not finite; the average and the schedule follow."""
        session = self.session
        skips = session.config.train.nonfinite == "skip"
        if skips and not session.group_nonfinite and not session.scaler.is_enabled():  # fp16 has its scaler
            session.group_nonfinite = not all_finite(session.process, self.gradients())
        if skips and session.group_nonfinite:
            session.skipped += 1
            session.optimizer.zero_grad(set_to_none=True)
        else:
            self.apply()
        session.group_nonfinite = False
        self.advance()

    def apply(self) -> None:
        """Clip, update, forget the gradients, and take the new weights into their average: all on the device."""
        session, train = self.session, self.session.config.train
        if train.clip_grad is not None:
            parameters: Any = list(session.task.get_clip_parameters(exclude_head=train.clip_mode == "agc"))
            session.scaler.unscale_(session.optimizer)
            dispatch_clip_grad(parameters, value=train.clip_grad, mode=train.clip_mode)
        session.scaler.step(session.optimizer)
        session.scaler.update()
        session.optimizer.zero_grad(set_to_none=True)
        session.task.update_ema(step=session.updates + 1)

    def advance(self) -> None:
        self.session.updates += 1
        if self.session.scheduler is not None:
            self.session.scheduler.step_update(self.session.updates)

    def gradients(self) -> list[Tensor]:
        groups = self.session.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def after_update(self, before: int, *, looked: bool) -> None:
        """Between two updates (`before`: updates before the last): the alarm, states, and an end that was asked for.

        Several processes agree when they have `looked`, since that waits for all of them.
        """
        session, train = self.session, self.session.config.train
        now, alone = session.updates, session.process.world_size == 1
        if self.alarm is not None and crossed(train.alarm_every, before, now):
            self.alarm.check()
        if alone or looked:  # a signal may wait for two such intervals, since what it interrupts is saved then
            if self.answered_at is not None and session.elapsed > self.answered_at:
                set_grace_period(2 * (session.elapsed - self.answered_at))
            self.answered_at = session.elapsed
        minutes = (time.monotonic() - self.saved_at) / 60
        stopping, late = self.stop.asked, session.process.first and 0 < train.save_minutes <= minutes
        if not alone:
            stopping, late = (looked and session.process.any(flag) for flag in (stopping, late))
        if stopping or late or crossed(train.save_every, before, now):
            self.raise_if_nonfinite()
            self.save()
        if stopping:
            self.leave()

    # saving and leaving

    def save(self) -> None:
        """The state alone."""
        if self.checkpoint is not None:
            self.checkpoint.save()
        self.saved_at = time.monotonic()

    def leave(self) -> NoReturn:
        place = "" if self.checkpoint is None else f" in {self.checkpoint.run.folder}"
        raise preempted(
            self.stop, f"saved at update {self.session.updates}{place}; the same command resumes from there."
        )

    def raise_if_nonfinite(self) -> None:
        """Stop at the first loss that is not a number, with its images and the state on record."""
        session, found = self.session, self.losses.find()
        if found is None or session.config.train.nonfinite == "skip":
            return
        if self.checkpoint is not None:
            note = json.dumps({"epoch": session.epoch, "updates": session.updates, **found}) + "\n"
            self.checkpoint.save_nonfinite(note)
        images = ", ".join(map(str, found["ids"][:8]))
        if len(found["ids"]) > 8:
            images += f", … ({len(found['ids'])} in all)"
        raise Diverged(
            f"the training loss is {found['loss']} at batch {found['batch'] + 1} of epoch {session.epoch + 1} "
            f"(images {images}). nonfinite.json and nonfinite.pt in the run folder hold batch and state. {REMEDY}"
        )

    # speed and what a person sees

    def make_fast_step(self) -> None:
        """What `train.compile: auto` makes of the steps, if anything."""

        def forward(x: Tensor, y: Tensor, labels: Tensor) -> tuple[Tensor, Numbers]:
            with self.session.autocast():
                result = self.session.task(x, y)
            return result["loss"], report_of(result, labels)

        session = self.session
        session.fast_step = make_fast_step(
            session.config, session.process, session.model, session.task, session.optimizer, forward, self.apply
        )

    @property
    def compiles(self) -> bool:
        """Whether the first batch waits for the compiler."""
        if self.session.config.train.compile == "auto":
            return self.session.fast_step is not None and self.session.fast_step.step.regions is not None
        return bool(self.session.config.train.compile)

    @property
    def held_out(self) -> str:
        """What the images are called that choose."""
        return "held-out" if self.session.config.train.holdout else self.session.config.data.val_split

    def show(self, text: str) -> None:
        """How far the run is, in batches of all epochs, and a text about now."""
        session = self.session
        done, total = session.epoch * self.batches + session.batch, session.num_epochs * self.batches
        self.progress(done, total, f"epoch {session.epoch + 1}/{session.num_epochs}, {text}")


def report_of(result: Numbers, labels: Tensor) -> Numbers:
    """Numbers for the log from what a task answered to a batch."""
    output = result["output"].detach()
    accuracy = (output.argmax(-1) == labels[: len(output)]).float().mean()
    scalars = {name: value.detach().float() for name, value in result.items() if value.dim() == 0}
    return {**scalars, "accuracy": accuracy}


def crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return every > 0 and before // every != now // every


def gradual_of(session: Session) -> GradualMask | None:
    """The masks that the recipe tightens; files and sites are checked by setting the first pattern."""
    asked = session.config.gradual
    if asked is None:
        return None
    final, maps = load_masks(asked.masks).keep, load_maps(asked.maps)[0]
    gradual = GradualMask(final, maps, epochs=asked.epochs, power=asked.power)
    set_masks(session, gradual)
    return gradual


def set_masks(session: Session, gradual: GradualMask | None) -> None:
    """The pattern of this epoch, in the weights and in their running average."""
    if gradual is None:
        return
    gradual.epoch_start(session.epoch, session.model)
    if session.task.has_ema():
        gradual.epoch_start(session.epoch, session.eval_model(ema=True))


def describe_epoch(row: dict[str, Any], epochs: int, held_out: str = "held-out", *, alarms_before: int = 0) -> str:
    """`epoch 3/10  loss 0.412  accuracy 91.2 %  held-out 93.1 % (robust 41.0 %)  1,204 images/s`.

    Alarms are counted over the run; those of this epoch are shown.
    """
    text = (
        f"epoch {row['epoch'] + 1:>{len(str(epochs))}}/{epochs}  loss {row['train_loss']:.3f}  "
        f"accuracy {100 * row['train_accuracy']:5.1f} %"
    )
    for name, key in ((held_out, "val"), ("EMA", "ema")):
        if f"{key}_accuracy" in row:
            text += f"  {name} {100 * row[f'{key}_accuracy']:5.1f} %"
        if f"{key}_robust_accuracy" in row:
            text += f" (robust {100 * row[f'{key}_robust_accuracy']:4.1f} %)"
    if row.get("skipped_updates"):
        text += f"  {row['skipped_updates']} update(s) skipped"
    if row.get("alarms", 0) > alarms_before:
        single, multi = 100 * row["single_step_accuracy"], 100 * row["multi_step_accuracy"]
        text += f"  ALARM {row['alarms']} (one step {single:.1f} %, several {multi:.1f} %)"
    return f"{text}  {row['images_per_second']:,.0f} images/s"
