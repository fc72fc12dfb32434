"""Checkpoints: everything a run needs to resume as if it had never stopped, in the middle of an epoch as well.

Weights, their average, optimiser, schedule, scaler, what the task itself remembers, the place in the epoch with its
half-made means, and all rows; random streams follow from the seed. The state is written first, in one step; weights and
metrics follow from it, so that a resume repairs what a crash at any point has left.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import atomic_write_text
from vitruvius._signals import saving
from vitruvius.data.identity import changes
from vitruvius.surgery.base import inner
from vitruvius.training.config import Keep
from vitruvius.training.parallel import load_shards, load_statistics, save_shards, statistics_of
from vitruvius.training.run_folder import CALM, KEPT, NONFINITE, Run, verify_checksum
from vitruvius.training.session import Counters, Session

logger = logging.getLogger(__name__)

VERSION = 3
Files = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]  # name → weights and notes


class Checkpoint:
    """The state of a session in its run folder, and the files that follow from it. Every process calls its methods."""

    def __init__(self, session: Session, run: Run) -> None:
        self.session, self.run = session, run

    def save(self, *, ended: bool = False) -> None:
        """The state; when an epoch has ended, the weights and metrics too."""

        def write() -> None:
            self.run.save_state(state)
            self._publish(files)

        with saving():
            state, files = self._capture(), files_of(self.session) if ended else None
            self.session.process.on_first(write)

    def _publish(self, files: Files | None) -> None:
        """Weights and metrics, if there are any, the metrics last."""
        if files is not None:
            for name, (weights, notes) in files.items():
                self.run.save_weights(name, weights, **notes)
            self.run.keep_epochs(epochs_to_keep(self.session.config.train.keep, self.session.rows))
            self.run.save_metrics(self.session.rows)
        self.run.push()

    def save_calm(self) -> None:
        """A state from a time without an alarm, for a rollback."""
        state = self._capture()
        self.session.process.on_first(lambda: self.run.write_state(CALM, state))

    def load_calm(self) -> bool:
        """Go back to that state; whether there is one."""
        file = self.run.folder / CALM
        state = self.session.process.on_first(lambda: verify_checksum(file.read_bytes()) if file.exists() else None)
        if state is not None:
            restore(self.session, state, str(self.run.folder))
        return state is not None

    def save_nonfinite(self, note: str) -> None:
        """The record of a loss that is not a number: `note` is JSON text."""

        def write() -> None:
            atomic_write_text(self.run.folder / "nonfinite.json", note)
            self.run.write_state(NONFINITE, state)
            self.run.push()

        state = self._capture()
        self.session.process.on_first(write)

    def _capture(self) -> dict[str, Any]:
        """The state; where weights are sharded each process writes its own part of them, and the state names those."""
        session, process = self.session, self.session.process
        state = capture(session)
        if session.is_sharded:
            folder = process.on_first(self.run.new_shards)
            state["optimizer"] = save_shards(session.model, session.optimizer, session.modules().get("ema"), folder)
            state["shards"] = process.on_first(lambda: self.run.checksums_of(folder))
        return state

    def resume(self) -> None:
        """Go back to where the state was saved; files that a crash has kept from following it are written now."""
        session, run = self.session, self.run
        state = session.process.on_first(run.load_state)
        if state is None:
            return
        session.process.on_first(lambda: self._check_data(state["data"]))
        restore(session, state, str(run.folder))
        if session.process.on_first(lambda: run.has_metrics(session.rows)):
            return
        # in the middle of an epoch the weights are not those of its start
        files = files_of(session) if session.batch == 0 else {}
        session.process.on_first(lambda: self._publish(files))

    def _check_data(self, before: dict[str, Any]) -> None:
        """Refuse, or mention, images that are not those the state was trained on."""
        for role, identity in before.items():
            differences = changes(identity, self.session.data_identity.get(role, {}))
            if not differences:
                continue
            text = f"{self.run.folder}: the {role} have changed since the run stopped: {'; '.join(differences[:3])}."
            if self.session.config.data.changed == "error":
                raise RunError(f"{text} Put them back, choose another out=…, or resume with data.changed=warn.")
            logger.warning("%s The run resumes with them (data.changed=warn).", text)


def files_of(session: Session) -> Files:
    """The weights that belong to the last finished epoch. Every process must call this."""
    epoch = session.epoch - 1
    files: Files = {"last": (session.weights(), {"epoch": epoch})}
    if session.task.has_ema():
        files["last_ema"] = (session.weights(ema=True), {"epoch": epoch})
    if session.best_epoch == epoch:
        weights = files["last_ema" if session.best_is_ema else "last"][0]
        files["best"] = (weights, {"epoch": epoch, "accuracy": session.best, "ema": session.best_is_ema})
    if epoch in epochs_to_keep(session.config.train.keep, session.rows):
        files[f"{KEPT}/epoch_{epoch + 1:04d}"] = (files["last"][0], {"epoch": epoch})
    return files


def epochs_to_keep(keep: Keep, rows: list[dict[str, Any]]) -> set[int]:
    """The epochs, counted from 0, whose weights `train.keep` wants, as far as the run has come."""
    regular = {row["epoch"] for row in rows if keep.every and (row["epoch"] + 1) % keep.every == 0}
    chosen_by = "val_robust_accuracy" if any("val_robust_accuracy" in row for row in rows) else "val_accuracy"
    judged = sorted((row for row in rows if chosen_by in row), key=lambda row: row[chosen_by], reverse=True)
    return regular | {row["epoch"] for row in judged[: keep.best]}


def capture(session: Session) -> dict[str, Any]:
    """The state after an update. Every process must call this; the first one's answer is whole."""
    task, process = session.task, session.process
    state: dict[str, Any] = {counter.name: getattr(session, counter.name) for counter in fields(Counters)}
    state |= {
        "version": VERSION,
        "processes": process.world_size,
        "updates_per_epoch": session.updates_per_epoch,
        "means": session.means.state(),
        "scaler": session.scaler.state_dict(),
        "plateau": None,
        "task": process.gather(on_cpu(task.get_task_state())),
        "rows": list(session.rows),
        "data": session.data_identity,
    }
    if not session.is_sharded:
        state |= {"model": session.weights(), "optimizer": session.optimizer.state_dict()}
        if task.has_ema():
            state["ema"] = session.weights(ema=True)
    plateau = getattr(session.scheduler, "lr_scheduler", None)  # timm's only schedule with a memory: torch's inside,
    if plateau is not None:  # and the rate under the noise
        state["plateau"] = {"inside": plateau.state_dict(), "restore_lr": session.scheduler.restore_lr}
    if task.has_ema():
        state["task_ema"] = on_cpu(task.get_task_state(ema=True))
    if process.world_size > 1:  # running statistics, which processes do not share between evaluations
        of_this = {name: on_cpu(statistics_of(module)) for name, module in session.modules().items()}
        state["statistics"] = process.gather(of_this)
    return state


def restore(session: Session, state: dict[str, Any], source: str) -> None:
    """Put a captured state back."""
    task, process = session.task, session.process
    if state.get("version") != VERSION:
        raise RunError(f"{source} was saved by another version of vitruvius and cannot resume. Choose another folder.")
    if state["processes"] != process.world_size:
        state = shared_out(state, session)
    if session.is_sharded:
        folder = (Path(source) / next(iter(state["shards"]))).parent
        load_shards(session.model, session.optimizer, session.modules().get("ema"), folder, state["optimizer"])
    else:
        for name, module in session.modules().items():
            inner(module).load_state_dict(state[name])
        session.optimizer.load_state_dict(state["optimizer"])
    if task.has_ema():
        task.load_task_state(state["task_ema"] or None, ema=True)
    if "statistics" in state:
        for name, values in state["statistics"][process.rank].items():
            load_statistics(session.modules()[name], values)
    task.load_task_state(state["task"][process.rank] or None)
    session.scaler.load_state_dict(state["scaler"])
    session.means.load(state["means"])
    for counter in fields(Counters):
        setattr(session, counter.name, state[counter.name])
    session.rows = list(state["rows"])
    if state["plateau"] is not None:
        session.scheduler.lr_scheduler.load_state_dict(state["plateau"]["inside"])
        session.scheduler.restore_lr = state["plateau"]["restore_lr"]


def shared_out(state: dict[str, Any], session: Session) -> dict[str, Any]:
    """A state of another number of processes as each of these would have saved it: means over what each had."""
    processes, per_update = session.process.world_size, session.config.train.grad_accum_steps / session.task.replays
    updates = state["updates"] - state["epoch"] * state["updates_per_epoch"]  # of this epoch
    recent = state["means"]["recent"]
    summed = {name: torch.stack([means[name] for means in recent]).sum(0) for name in recent[0]}
    nothing = {name: torch.zeros_like(value) for name, value in summed.items()}
    changed = {
        "means": {**state["means"], "recent": [summed, *[nothing] * (processes - 1)]},
        "task": state["task"][:1] * processes,
        "updates": state["epoch"] * session.updates_per_epoch + updates,  # what does not fill a batch may differ
        "batch": min(int(updates * per_update), len(session.train_loader)),
    }
    if "statistics" in state:
        of_each = state["statistics"]
        pairs = {name: zip(*(one[name] for one in of_each), strict=True) for name in of_each[0]}
        changed["statistics"] = [{name: [*map(on_average, values)] for name, values in pairs.items()}] * processes
    return {**state, **changed}


def on_average(values: tuple[Tensor, ...]) -> Tensor:
    """The mean over processes; of what is counted, the first one's."""
    return torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]


def on_cpu(value: Any) -> Any:
    """Tensors anywhere in a state, where every process can read them."""
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(item) for item in value)
    return value.cpu() if isinstance(value, Tensor) else value
