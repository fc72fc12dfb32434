"""What is kept of a run and when: states between updates, files after epochs, an end when a signal asks for one."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from vitruvius._errors import Preempted, RunError
from vitruvius._signals import saving, set_grace_period
from vitruvius.data.identity import Identity, changes, touched
from vitruvius.training._guards.alarm import Alarm, Reading, logger
from vitruvius.training._guards.nonfinite import LossWatch, as_json, error_for
from vitruvius.training._guards.preemption import Stop
from vitruvius.training._run.folder import KEPT, Run
from vitruvius.training._run.state import apply, capture
from vitruvius.training._session import Session
from vitruvius.training.config import Keep


class RolledBack(Exception):
    """The session stands at an earlier state; its epoch must be entered anew."""


class Keeper:
    """Between updates: looks at losses, the alarm, the clock and the signals, and saves."""

    def __init__(self, session: Session, run: Run, stop: Stop, alarm: Alarm | None) -> None:
        self.session = session
        self.run = run
        self.stop = stop
        self.alarm = alarm
        self.saved_at = time.monotonic()
        self.alarms_before = session.alarms
        self.measured_at: float | None = None  # seconds of this epoch when a signal could last be answered

    def between(self, losses: LossWatch, *, before: int, looked: bool) -> None:
        """After an update (`before`: updates before it). Several processes agree when they have looked."""
        train = self.session.config.train
        now = self.session.updates
        if self.alarm is not None and _crossed(train.alarm_every, before, now):
            self.watch()
        self._measure(looked)
        stopping = self._agreed(self.stop.asked, looked)
        late = self._agreed(self._late(), looked)
        if stopping or late or _crossed(train.save_every, before, now):
            self.nonfinite(losses)
            self.save()
        if stopping:
            self._leave()

    def _measure(self, looked: bool) -> None:
        """A signal may wait as long as two such intervals take, since what it interrupts is saved then."""
        if self.session.process.world_size > 1 and not looked:
            return
        now = self.session.elapsed
        if self.measured_at is not None and now > self.measured_at:
            set_grace_period(2 * (now - self.measured_at))
        self.measured_at = now

    def _agreed(self, flag: bool, looked: bool) -> bool:
        """Whether any process says so; several ask each other only when they have `looked`, since that waits."""
        if self.session.process.world_size == 1:
            return flag
        return looked and self.session.process.any(flag)

    def leave_while_looking(self, done: float, total: float | None, words: str = "", /) -> None:
        """Between two batches of a look at the held-out images: the epoch is saved and looked at when the run resumes.

        Several processes finish the look, since they would have to agree at every batch.
        """
        if not self.stop.asked or self.session.process.world_size > 1:
            return
        self.session.alarms = self.alarms_before  # which rings again then
        self.save()
        self._leave()

    def leave_if_asked(self) -> None:
        """After an epoch, when all is saved."""
        if self.session.process.any(self.stop.asked):
            self._leave()

    def nonfinite(self, losses: LossWatch) -> None:
        """Stop at the first loss that was no number, with its images on record."""
        session = self.session
        found = losses.find()
        if found is None or session.config.train.nonfinite == "skip":
            return
        state = capture(session)
        note = as_json(found, session.epoch, session.updates)
        session.process.on_first(lambda: self.run.save_nonfinite(note, state))
        raise error_for(found, session.epoch)

    def watch(self) -> Reading:
        """Look at the alarm, and do what the recipe says; a calm state is kept for a rollback."""
        assert self.alarm is not None
        self.session.agree_on_statistics()
        self.alarms_before = self.session.alarms
        reading = self.alarm.read()
        if self.alarm.rings(reading):
            self._ring(self.alarm, reading)
        elif self.alarm.action == "rollback":
            state = capture(self.session)
            self.session.process.on_first(lambda: self.run.save_calm(state))
        return reading

    def save(self) -> None:
        """The state alone."""
        with saving():
            state = capture(self.session)
            self.session.process.on_first(lambda: self._write(state))
        self.saved_at = time.monotonic()

    def _write(self, state: dict[str, Any]) -> None:
        self.run.save_state(state)
        self.run.push()

    def _leave(self) -> None:
        cause = self.stop.name or "a signal to another process"
        place = f"update {self.session.updates} in {self.run.folder}"
        raise Preempted(f"{cause}: saved at {place}; the same command goes on from there.")

    def _late(self) -> bool:
        minutes = self.session.config.train.save_minutes
        return self.session.process.first and 0 < minutes <= (time.monotonic() - self.saved_at) / 60

    def _ring(self, alarm: Alarm, reading: Reading) -> None:
        session = self.session
        session.alarms += 1
        if alarm.action == "report":
            if session.process.first:
                logger.warning("%s", alarm.message(reading, more="Training goes on (train.alarm=report)."))
            return
        calm = None
        if alarm.action == "rollback":
            calm = session.process.on_first(self.run.load_calm)
        if calm is None:
            raise alarm.stop(reading)
        if session.rollbacks >= session.config.train.alarm_rollbacks:
            raise alarm.stop(reading, f"{session.rollbacks} rollback(s) have not helped.")
        self._roll_back(alarm, reading, calm)

    def _roll_back(self, alarm: Alarm, reading: Reading, calm: dict[str, Any]) -> None:
        session = self.session
        factor = session.config.train.alarm_lr
        if session.process.first:
            more = f"Back to update {calm['updates']}, with {factor:g} of the rate."
            logger.warning("%s", alarm.message(reading, more=more))
        alarms = session.alarms
        rollbacks = session.rollbacks + 1
        apply(session, calm, str(self.run.folder))
        for group in session.optimizer.param_groups:  # timm's schedules multiply by lr_scale
            change = factor ** (rollbacks - session.rollbacks)
            group["lr_scale"] = group.get("lr_scale", 1.0) * change
            group["lr"] *= change
        session.alarms = alarms
        session.rollbacks = rollbacks
        self.save()
        raise RolledBack


def keep(session: Session, run: Run) -> None:
    """The state first, in one step; then what follows from it, so that a crash at any point is mended by a resume."""
    with saving():
        state = capture(session)
        files = collect(session)
        session.process.on_first(lambda: _save(session, run, state, files))


def resume(session: Session, run: Run) -> None:
    """Go on where the state was saved; files that a crash has kept from following it are written now."""
    state = session.process.on_first(run.load_state)
    if state is None:
        return
    session.process.on_first(lambda: check_data(session, state.get("data", {}), str(run.folder)))
    apply(session, state, str(run.folder))
    if session.process.on_first(lambda: run.has_metrics(session.rows)):
        return
    files: Files = {}
    if session.batch == 0:  # in an epoch the weights are not those of its start
        files = collect(session)
    session.process.on_first(lambda: publish(session, run, files))


def check_data(session: Session, before: dict[str, Identity], source: str) -> None:
    """Refuse, or mention, images that are not those the state was trained on; older states say nothing of theirs."""
    for role, identity in before.items():
        now = session.data_identity.get(role, {})
        if touched(identity, now):
            logger.warning(
                "%s: files of the %s have other times than before; their names and sizes, and a sample of their "
                "contents, are the same, so the run goes on.",
                source,
                role,
            )
        said = changes(identity, now)
        if not said:
            continue
        text = f"{source}: the {role} have changed since the run stopped: {'; '.join(said[:3])}."
        if session.config.data.changed == "error":
            raise RunError(f"{text} Put them back, choose another folder with out=…, or go on with data.changed=warn.")
        logger.warning("%s The run goes on with them (data.changed=warn).", text)


Files = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]  # name → weights and notes


def collect(session: Session) -> Files:
    """The weights that belong to the last finished epoch. Every process must ask."""
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
    wanted: set[int] = set()
    if keep.every:
        wanted = {row["epoch"] for row in rows if (row["epoch"] + 1) % keep.every == 0}
    judged = [row for row in rows if "val_accuracy" in row]
    judged.sort(key=lambda row: row.get("val_robust_accuracy", row["val_accuracy"]), reverse=True)
    return wanted | {row["epoch"] for row in judged[: keep.best]}


def publish(session: Session, run: Run, files: Files) -> None:
    """Weights and metrics, the metrics last."""
    for name, (weights, notes) in files.items():
        run.save_weights(name, weights, **notes)
    run.keep_epochs(epochs_to_keep(session.config.train.keep, session.rows))
    run.save_metrics(session.rows)
    run.push()


def _save(session: Session, run: Run, state: dict[str, Any], files: Files) -> None:
    run.save_state(state)
    publish(session, run, files)


def _crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return every > 0 and before // every != now // every
