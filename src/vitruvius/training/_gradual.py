"""Masks that tighten while a recipe trains: the `gradual:` section, applied before every epoch."""

from __future__ import annotations

from vitruvius._config import bind
from vitruvius.compression.files import load_maps, load_masks
from vitruvius.compression.gradual import GradualMask
from vitruvius.training._session import Session


def gradual_of(session: Session) -> GradualMask | None:
    """What the recipe asks for; files and sites are checked by putting the first pattern in."""
    if session.config.gradual is None:
        return None
    gradual = open_gradual(**bind("gradual", open_gradual, session.config.gradual, where="gradual"))
    start_epoch(session, gradual)
    return gradual


def open_gradual(*, masks: str, maps: str, epochs: int, power: float = 3.0) -> GradualMask:
    """From the files that `vitruvius masks` and `vitruvius maps` write."""
    return GradualMask(load_masks(masks).keep, load_maps(maps)[0], epochs=epochs, power=power)


def start_epoch(session: Session, gradual: GradualMask | None) -> None:
    """The pattern of this epoch, in the weights and in their running average."""
    if gradual is None:
        return
    gradual.epoch_start(session.epoch, session.model)
    if session.task.has_ema():
        gradual.epoch_start(session.epoch, session.eval_model(ema=True))
