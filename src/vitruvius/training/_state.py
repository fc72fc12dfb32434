"""Everything that a run needs to go on as if it had never stopped: weights, optimiser, schedule, random states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from vitruvius.surgery import inner
from vitruvius.training._session import Session


def capture(session: Session) -> dict[str, Any]:
    """The state after a finished epoch; every process contributes its random state."""
    state = {
        "epoch": session.epoch,
        "updates": session.updates,
        "best": session.best,
        "rows": session.rows,
        "model": inner(session.eval_model()).state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "scaler": session.scaler.state_dict(),
        "luck": session.process.gather(capture_luck(session)),
    }
    if session.task.has_ema():
        state["ema"] = inner(session.eval_model(ema=True)).state_dict()
    return state


def apply(session: Session, state: dict[str, Any]) -> None:
    """Put a captured state back."""
    inner(session.eval_model()).load_state_dict(state["model"])
    if session.task.has_ema():
        inner(session.eval_model(ema=True)).load_state_dict(state["ema"])
    session.optimizer.load_state_dict(state["optimizer"])
    session.scaler.load_state_dict(state["scaler"])
    session.epoch, session.updates, session.best = state["epoch"], state["updates"], state["best"]
    session.rows = state["rows"]
    if session.scheduler is not None:
        session.scheduler.step_update(session.updates)
    luck = state["luck"]
    apply_luck(session, luck[session.process.rank % len(luck)])


def capture_luck(session: Session) -> dict[str, Any]:
    """States of every random number generator that training may draw from."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 (timm draws from numpy's global state)
    return {
        "torch": torch.get_rng_state(),
        "device": _device_state(session),
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    }


def apply_luck(session: Session, luck: dict[str, Any]) -> None:
    torch.set_rng_state(luck["torch"])
    if luck["device"] is not None:
        torch.get_device_module(session.process.device).set_rng_state(luck["device"], session.process.device)
    version, numbers, gauss = luck["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = luck["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002


def _device_state(session: Session) -> Any:
    if session.process.device.type == "cpu":
        return None
    return torch.get_device_module(session.process.device).get_rng_state(session.process.device)
