"""How eps grows while a model learns: a share of the final radius, the same for a whole epoch or new at every update.

Debenedetti et al. 2023, arXiv:2209.07399: e epochs done, Z epochs without an attack, P the epoch where the ramp ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius._registry import Registry


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A share of eps from 0 to 1, by the number of epochs done."""

    zero: float = key(0.0, "epochs without an attack at the start")
    per: Literal["epoch", "update"] = key("epoch", "eps moves after whole epochs, or at every update")

    def share(self, *, epoch: int, update: int, updates_per_epoch: int) -> float:
        """The share when so many epochs and updates are done in the whole run."""
        within = 0.0 if self.per == "epoch" else update % updates_per_epoch / updates_per_epoch
        return self.after(epoch + within)

    @abstractmethod
    def after(self, epochs: float) -> float:
        """The share after this number of epochs, whole or not."""


schedules: Registry[Callable[..., Schedule]] = Registry("eps schedule")


@schedules.register("constant")
@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The final eps at once, after `zero` epochs without an attack."""

    def after(self, epochs: float) -> float:
        return 0.0 if epochs < self.zero else 1.0


@dataclass(frozen=True, kw_only=True)
class Ramp(Schedule):
    """From 0 at epoch `zero` to 1 at epoch `epochs`; the released code divides by `epochs` and so jumps at the end."""

    epochs: float = required("epoch at which eps is final, counted from the start of the run")
    variant: Literal["paper", "released"] = key("paper", "released: divides by `epochs` even with `zero`, so eps jumps")

    def __post_init__(self) -> None:
        if self.variant == "paper" and self.epochs < self.zero:
            raise ConfigError(
                f"task.schedule ends its ramp at epoch {self.epochs:g}, before it begins at epoch {self.zero:g}: "
                "`epochs` counts from the start of the run, `zero` included."
            )

    def after(self, epochs: float) -> float:
        if epochs < self.zero:
            return 0.0
        if epochs >= self.epochs:
            return 1.0
        length = self.epochs if self.variant == "released" else self.epochs - self.zero
        return self.rise((epochs - self.zero) / length)

    @abstractmethod
    def rise(self, way: float) -> float:
        """The share after a part of the way, 0 to 1."""


@schedules.register("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(Ramp):
    """Evenly up."""

    def rise(self, way: float) -> float:
        return way


@schedules.register("sine")
@dataclass(frozen=True, kw_only=True)
class Sine(Ramp):
    """Slowly at both ends: half a wave of a sine."""

    def rise(self, way: float) -> float:
        return (1 + math.sin(math.pi * (way - 0.5))) / 2


def make_schedule(spec: str | dict[str, Any] | Schedule) -> Schedule:
    """From a recipe: `constant`, `linear:epochs=10`, `{use: linear, epochs: 10}`, or a Schedule itself."""
    schedule = schedules.make(spec, where="task.schedule")
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"task.schedule is a {type(schedule).__name__}; expected a Schedule.")
    return schedule
