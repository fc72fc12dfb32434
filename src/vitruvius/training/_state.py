"""Everything a run needs to go on as if it had never stopped: weights, their average, optimiser, schedule, rows."""

from __future__ import annotations

from typing import Any

from vitruvius._errors import RunError
from vitruvius.surgery import inner
from vitruvius.training._session import Session

COUNTERS = ("epoch", "updates", "best", "best_epoch", "best_is_ema", "rows")


def capture(session: Session) -> dict[str, Any]:
    """The state after a finished epoch. Dice need no place in it: see `_luck`."""
    state = {name: getattr(session, name) for name in COUNTERS}
    state |= {
        "processes": session.process.world_size,
        "model": inner(session.eval_model()).state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "scaler": session.scaler.state_dict(),
        "plateau": _plateau(session).state_dict() if _plateau(session) is not None else None,
    }
    if session.task.has_ema():
        state["ema"] = inner(session.eval_model(ema=True)).state_dict()
    return state


def apply(session: Session, state: dict[str, Any], source: str) -> None:
    """Put a captured state back."""
    if state["processes"] != session.process.world_size:
        raise RunError(
            f"{source} was trained by {state['processes']} process(es) and cannot go on with "
            f"{session.process.world_size}: every update would see another number of images."
        )
    inner(session.eval_model()).load_state_dict(state["model"])
    if session.task.has_ema():
        inner(session.eval_model(ema=True)).load_state_dict(state["ema"])
    session.optimizer.load_state_dict(state["optimizer"])
    session.scaler.load_state_dict(state["scaler"])
    for name in COUNTERS:
        setattr(session, name, state[name])
    if session.scheduler is not None:
        session.scheduler.step_update(session.updates)
    if _plateau(session) is not None:
        _plateau(session).load_state_dict(state["plateau"])


def _plateau(session: Session) -> Any:
    """torch's scheduler inside timm's plateau schedule, the only one with a memory."""
    return getattr(session.scheduler, "lr_scheduler", None)
