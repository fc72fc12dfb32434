"""train: make the run folder, train epoch by epoch, keep the best and the last weights, go on after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import nn

from vitruvius._processes import joined
from vitruvius._registry import load_plugins
from vitruvius.analysis import AnalysisCallback, first_images
from vitruvius.evaluation import evaluate
from vitruvius.training._epoch import train_epoch
from vitruvius.training._gradual import gradual_of, start_epoch
from vitruvius.training._luck import borrowed_luck
from vitruvius.training._progress import Bar
from vitruvius.training._run import Run
from vitruvius.training._session import Session, open_session
from vitruvius.training._state import apply, capture
from vitruvius.training.config import Config, check


class Callback(Protocol):
    """Told after every epoch, on the first process, when its files are written."""

    def epoch_end(self, epoch: int, model: nn.Module) -> object: ...


def train(
    config: Config, *, quiet: bool = False, console: Console | None = None, callbacks: Sequence[Callback] = ()
) -> Path:
    """Train as the recipe says; the run folder. Called again with the same recipe, it goes on where it stopped."""
    check(config, "the recipe")
    load_plugins(config.plugins)
    run = Run(config.out or "runs/unnamed")
    with joined(config.train.device) as process, borrowed_luck(process.device):
        session = open_session(config, process)  # everything that can be wrong is found before a file is written
        process.once(lambda: run.begin(session.config))
        try:
            resume(session, run)
            bar = Bar.of(session, shown=process.first and not quiet, console=console)
            watchers = [*callbacks, *analyses_of(session, run)] if process.first else []
            _run_epochs(session, run, bar, watchers)
        except BaseException:
            if process.first:
                run.abandon()
            raise
    return run.folder


def analyses_of(session: Session, run: Run) -> list[Callback]:
    """The analyses that a recipe asks for while training, of fixed images; curves go to analysis.jsonl."""
    config = session.config
    if not config.analyses:
        return []
    batches = {
        name: first_images(loader, config.train.analyse_images)
        for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
    }
    return [AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=run.folder)]


def _run_epochs(session: Session, run: Run, bar: Bar, callbacks: Sequence[Callback]) -> None:
    gradual = gradual_of(session)
    with bar:
        while session.epoch < session.num_epochs:
            bar.start(session.epoch)
            start_epoch(session, gradual)
            row = {"epoch": session.epoch, **train_epoch(session, bar.batch)}
            last = session.epoch + 1 == session.num_epochs
            if last or (session.epoch + 1) % session.config.train.evaluate_every == 0:
                row |= validate(session)
            finish_epoch(session, row, final=gradual is None or gradual.finished(session.epoch))
            keep(session, run)
            bar.epoch(row)
            for callback in callbacks:
                callback.epoch_end(session.epoch - 1, session.eval_model())


def validate(session: Session) -> dict[str, float]:
    """Accuracy on the images that choose, of the weights and of their running average."""
    numbers: dict[str, float] = {}
    for name, ema in (("val", False), ("ema", True)):
        if ema and not session.task.has_ema():
            continue
        model = session.eval_model(ema=ema).eval()
        with session.autocast():
            score = evaluate(model, session.val_loader, process=session.process)["clean"]
        numbers |= {f"{name}_accuracy": score.accuracy, f"{name}_loss": float(score.loss or 0.0)}
    return numbers


def finish_epoch(session: Session, row: dict[str, Any], *, final: bool = True) -> None:
    """Count the epoch, move a schedule that goes by epochs, and judge whether these weights are the best so far.

    Weights that were trained with looser masks than the `final` ones are never the best.
    """
    session.rows.append(row)
    session.epoch += 1
    if session.scheduler is not None:
        session.scheduler.step(session.epoch, row.get("val_accuracy"))
    scores = {ema: row[key] for key, ema in (("val_accuracy", False), ("ema_accuracy", True)) if key in row}
    if final and scores and max(scores.values()) > session.best:
        session.best_is_ema = max(scores, key=lambda ema: (scores[ema], ema))
        session.best, session.best_epoch = scores[session.best_is_ema], row["epoch"]


def keep(session: Session, run: Run) -> None:
    """The state first, in one step; then what follows from it, so that a crash at any point is mended by a resume."""
    session.process.once(lambda: _save(session, run))


def resume(session: Session, run: Run) -> None:
    """Go on where the state was saved; files that a crash has kept from following it are written now."""
    if not session.process.once(run.has_state):
        return
    apply(session, run.load_state(), str(run.folder))
    session.process.once(lambda: None if run.has_metrics(session.rows) else publish(session, run))


def publish(session: Session, run: Run) -> None:
    """Weights and metrics of the last finished epoch, the metrics last."""
    epoch = session.epoch - 1
    run.save_weights("last", session.eval_model(), epoch=epoch)
    if session.task.has_ema():
        run.save_weights("last_ema", session.eval_model(ema=True), epoch=epoch)
    if session.best_epoch == epoch:
        chosen = session.eval_model(ema=session.best_is_ema)
        run.save_weights("best", chosen, epoch=epoch, accuracy=session.best, ema=session.best_is_ema)
    run.save_metrics(session.rows)


def _save(session: Session, run: Run) -> None:
    run.save_state(capture(session))
    publish(session, run)
