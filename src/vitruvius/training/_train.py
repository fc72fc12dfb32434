"""train: make the run folder, train epoch by epoch, keep the best and the last weights, go on after a stop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitruvius._processes import Process, joined
from vitruvius._registry import load_plugins
from vitruvius.evaluation import evaluate
from vitruvius.training._epoch import train_epoch
from vitruvius.training._progress import Bar
from vitruvius.training._run import Run
from vitruvius.training._session import Session, open_session
from vitruvius.training._state import apply, apply_luck, capture, capture_luck
from vitruvius.training.config import Config, check


def train(config: Config, *, quiet: bool = False) -> Path:
    """Train as the recipe says; the run folder. Called again with the same recipe, it goes on where it stopped."""
    check(config, "the recipe")
    load_plugins(config.plugins)
    run = Run(config.out or "runs/unnamed")
    with joined(config.train.device) as process:
        session = open_session(config, process)  # everything that can be wrong is found before a file is written
        unfinished = process.share(run.begin(session.config) if process.first else None)
        with own_luck(session):
            if unfinished:
                apply(session, run.load_state())
                if process.first:
                    run.rewrite(session.rows)
            process.wait()
            _run_epochs(session, run, shown=process.first and not quiet)
    return run.folder


def _run_epochs(session: Session, run: Run, *, shown: bool) -> None:
    batches = len(session.train_loader)
    with Bar(epochs=session.num_epochs, start=session.epoch, batches=batches, shown=shown) as bar:
        while session.epoch < session.num_epochs:
            epoch = session.epoch
            bar.start(epoch)
            row = {"epoch": epoch, **train_epoch(session, bar.batch)}
            last = epoch + 1 == session.num_epochs
            if last or (epoch + 1) % session.config.train.evaluate_every == 0:
                row |= validate(session)
            session.epoch += 1
            if session.scheduler is not None:
                session.scheduler.step(session.epoch, row.get("val_accuracy"))
            keep(session, run, row)
            bar.epoch(row)


def validate(session: Session) -> dict[str, float]:
    """Accuracy on the images that choose, of the weights and of their running average."""
    numbers: dict[str, float] = {}
    for name, ema in (("val", False), ("ema", True)):
        if ema and not session.task.has_ema():
            continue
        model = session.eval_model(ema=ema)
        training = model.training
        with session.autocast():
            score = evaluate(model.eval(), session.val_loader, process=session.process)["clean"]
        model.train(training)
        numbers |= {f"{name}_accuracy": score.accuracy, f"{name}_loss": float(score.loss or 0.0)}
    return numbers


def keep(session: Session, run: Run, row: dict[str, Any]) -> None:
    """Write weights, state and metrics, in an order that a crash at any point leaves usable."""
    ema = session.task.has_ema()
    score = max(row.get("val_accuracy", -1.0), row.get("ema_accuracy", -1.0))
    improved = score > session.best
    session.best = max(session.best, score)
    session.rows.append(row)
    state = capture(session)
    if session.process.first:
        if improved:
            chosen = session.eval_model(ema=ema and row["ema_accuracy"] >= row["val_accuracy"])
            run.save_weights("best", chosen, epoch=row["epoch"], accuracy=score)
        run.save_weights("last", session.eval_model(), epoch=row["epoch"])
        run.save_state(state)
        run.note(row)
    session.process.wait()


@contextmanager
def own_luck(session: Session) -> Iterator[None]:
    """Seed this process's dice from the recipe, and leave the caller's as they were."""
    before = capture_luck(session)
    try:
        seed_luck(session.config.seed, session.process)
        yield
    finally:
        apply_luck(session, before)


def seed_luck(seed: int, process: Process) -> None:
    """Different dice in every process, the same in every run."""
    own = seed * 1_000_003 + process.rank
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 (timm's augmentations draw from numpy's global state)
