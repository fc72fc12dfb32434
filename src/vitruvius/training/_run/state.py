"""Everything a run needs to go on as if it had never stopped, in the middle of an epoch as well.

Weights, their average, optimiser, schedule, scaler, what the task itself remembers, the place in the epoch with its
half-made means, and all rows. Random streams need no place in it: see `_seeding`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from vitruvius._errors import RunError
from vitruvius.surgery import inner
from vitruvius.training._parallel import (
    full_optimizer,
    load_full,
    load_full_optimizer,
    load_statistics,
    statistics_of,
)
from vitruvius.training._session import Counters, Session

VERSION = 2


def capture(session: Session) -> dict[str, Any]:
    """The state after an update. Every process must ask; the first one's answer is whole."""
    state: dict[str, Any] = {counter.name: getattr(session, counter.name) for counter in fields(Counters)}
    state |= {
        "version": VERSION,
        "processes": session.process.world_size,
        "means": session.means.state(),
        "model": session.weights(),
        "optimizer": _optimizer_state(session),
        "scaler": session.scaler.state_dict(),
        "plateau": _plateau_state(session),
        "task": session.process.gather(_on_cpu(session.task.get_task_state())),
        "rows": list(session.rows),
        "data": session.data_identity,
    }
    if session.task.has_ema():
        state["ema"] = session.weights(ema=True)
        state["task_ema"] = _on_cpu(session.task.get_task_state(ema=True))
    if session.process.world_size > 1:
        state["statistics"] = session.process.gather(_statistics(session))
    return state


def _statistics(session: Session) -> dict[str, list[Tensor]]:
    """Running statistics of this process's batch norms, which other processes do not share between evaluations."""
    found = {"model": _on_cpu(statistics_of(session.wrapped()))}
    if session.task.has_ema():
        found["ema"] = _on_cpu(statistics_of(session.wrapped(ema=True)))
    return found


def apply(session: Session, state: dict[str, Any], source: str) -> None:
    """Put a captured state back."""
    if state["processes"] != session.process.world_size:
        raise RunError(
            f"{source} was trained by {state['processes']} process(es) and cannot go on with "
            f"{session.process.world_size}: every update would see another number of images."
        )
    if state.get("version") != VERSION:
        raise RunError(f"{source} was saved by another version of vitruvius and cannot go on. Choose another folder.")
    _load_weights(session, state["model"], ema=False)
    if session.task.has_ema():
        _load_weights(session, state["ema"], ema=True)
        session.task.load_task_state(state["task_ema"] or None, ema=True)
    if "statistics" in state:
        own = state["statistics"][session.process.rank]
        for name, values in own.items():
            load_statistics(session.wrapped(ema=name == "ema"), values)
    session.task.load_task_state(state["task"][session.process.rank] or None)
    _load_optimizer(session, state["optimizer"])
    session.scaler.load_state_dict(state["scaler"])
    session.means.load(state["means"])
    for counter in fields(Counters):
        if counter.name in state:  # a state of an earlier release may lack a counter that is new
            setattr(session, counter.name, state[counter.name])
    session.rows = list(state["rows"])
    _load_plateau(session, state["plateau"])


def _load_weights(session: Session, weights: dict[str, Any], *, ema: bool) -> None:
    model = inner(session.wrapped(ema=ema))
    if session.replica is None:
        model.load_state_dict(weights)
    else:
        load_full(model, weights)


def _optimizer_state(session: Session) -> dict[str, Any]:
    if session.replica is None:
        return session.optimizer.state_dict()
    return full_optimizer(session.model, session.optimizer)


def _load_optimizer(session: Session, state: dict[str, Any]) -> None:
    if session.replica is None:
        session.optimizer.load_state_dict(state)
    else:
        load_full_optimizer(session.model, session.optimizer, state)


def _plateau_state(session: Session) -> dict[str, Any] | None:
    """Of timm's plateau schedule, the only one with a memory: torch's scheduler inside, the rate under the noise."""
    inside = getattr(session.scheduler, "lr_scheduler", None)
    if inside is None:
        return None
    return {"inside": inside.state_dict(), "restore_lr": session.scheduler.restore_lr}


def _load_plateau(session: Session, state: dict[str, Any] | None) -> None:
    if state is not None:
        session.scheduler.lr_scheduler.load_state_dict(state["inside"])
        session.scheduler.restore_lr = state["restore_lr"]


def _on_cpu(value: Any) -> Any:
    """Tensors anywhere in a state, where every process can read them."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value.cpu() if hasattr(value, "cpu") else value
