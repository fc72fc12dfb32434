"""The inner maximisation of adversarial training: any attack of ours, its eps as far as the schedule has come.

Nothing here waits for the device: checks that read tensors are made on the first batch alone. B images, K classes.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius._random import BatchDraws
from vitruvius._registry import Registry, read_spec
from vitruvius.attacks.base import (
    Attack,
    Norm,
    Searched,
    Threat,
    as_norm,
    attacks,
    check_inputs,
    disturb,
    frozen,
    full_precision,
    hard_labels,
)
from vitruvius.attacks.pgd import PGD
from vitruvius.tasks.base import batch_norm_frozen

Spec = str | dict[str, Any] | Callable[..., Threat]  # pgd:steps=1, {use: pgd, steps: 1}, or what makes a threat
SCALE = 2.0**12  # the gradients of an image are small, float16 ends at 6e-8


@dataclass(eq=False, kw_only=True)
class InnerAttack:
    """x' for a batch of training images, by the attack that `spec` means, of this final radius in this norm."""

    spec: InitVar[Spec]
    final_eps: float
    norm: Norm
    schedule: Schedule
    coupled: bool  # whether the step size shrinks with eps
    mode: Literal["eval", "train"]  # of the model while it is attacked
    freeze_batch_norm: bool
    precision: Literal["same", "fp32", "bf16"]
    checked = False
    on_device: Tensor | None = field(
        default=None, init=False
    )  # (2,) eps and step size, where a recorded step reads them
    share: float | None = field(default=None, init=False)  # of the final eps; not known before `at`

    def __post_init__(self, spec: Spec) -> None:
        self.make_attack = bound_attack(spec, eps=self.final_eps, norm=self.norm)
        self.step = self._named_step()
        self.at(epoch=0, update=0, updates_per_epoch=1)

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Called before every batch; another attack is made only where eps has changed."""
        share = self.schedule.share(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)
        if share != self.share:
            self.share = share
            self.eps = share * self.final_eps
            self.attack = self._attack_at(share)

    @property
    def radius(self) -> float | Tensor:
        """eps as it is now; a tensor where steps read it from the device."""
        return self.eps if self.on_device is None else self.on_device[0]

    def keep_radius_on(self, device: torch.device) -> None:
        """From now on steps read eps and the step size from the device, if the attack can; their values stay."""
        if getattr(self.attack, "radius_may_be_tensor", False):
            self.on_device = torch.zeros(2, dtype=torch.float64, device=device)
            assert self.share is not None
            self.attack = self._attack_at(self.share)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, called: nn.Module, draws: BatchDraws, from_answer: bool = False
    ) -> Tensor:
        """x' of x's shape; `called` is the model, or a compiled form of it.

        `from_answer`: move away from the model's own answer instead of the label. `draws` gives each
        image the key of its random numbers.
        """
        if self.eps == 0:
            return x
        kind = x.device.type
        precision: AbstractContextManager[Any] = nullcontext()  # same as the autocast around
        if self.precision != "same":
            precision = torch.autocast(kind, torch.bfloat16, enabled=self.precision == "bf16")
        with self.model_mode(model), frozen(model), torch.no_grad(), precision:
            half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
            answer: Any = Scaled(called) if half else called
            if not self.checked:  # the first batch: images are pixels, labels are classes, logits are numbers
                self.checked = True
                check_inputs(x, y)
                answer = Searched(answer, y) if isinstance(self.attack, Attack) else answer
            labels = full_precision(answer(x)).softmax(1) if from_answer else hard_labels(y)
            ids = draws.keys(x)
            if isinstance(self.attack, Attack):  # which has a search without checks
                return self.attack.search(answer, x.detach(), labels, self.attack.dice(ids)).detach()
            return disturb(self.attack, answer, x.detach(), labels, ids).detach()

    def model_mode(self, model: nn.Module) -> AbstractContextManager[None]:
        """The mode of the model while it is attacked."""
        if self.mode == "eval":
            return in_eval_mode(model)
        return batch_norm_frozen(model) if self.freeze_batch_norm else nullcontext()

    def _attack_at(self, share: float) -> Threat:
        """The attack at a share of the final eps; its eps and step size are tensors where steps read those."""
        settings = {} if self.step is None else {"step_size": self.step * share if self.coupled else self.step}
        attack = self.make_attack(eps=self.eps, **settings)
        if self.on_device is None:
            return attack
        assert isinstance(attack, Attack)
        reading = copy.copy(attack)
        step = 0.0
        if isinstance(attack, PGD):
            step = attack.step_length()
            object.__setattr__(reading, "step_size", self.on_device[1])
        object.__setattr__(reading, "eps", self.on_device[0])
        self.on_device.copy_(torch.tensor([attack.eps, step], dtype=torch.float64), non_blocking=True)
        return reading

    def _named_step(self) -> float | None:
        """The step size at the final eps, where it must be named: one that was given, or must not shrink."""
        attack = self.make_attack()
        given: float | None = getattr(attack, "step_size", None)
        if given is not None or self.coupled:
            return given
        if not isinstance(attack, PGD):
            raise ConfigError(
                f"task.coupled = false, but {type(attack).__name__} has no step size of its own that could stay; "
                "use pgd, or give the attack a step_size."
            )
        return attack.step_length()


def bound_attack(spec: Spec, *, eps: float, norm: str | Norm) -> partial[Threat]:
    """What makes the attack, with its settings bound and checked; eps and norm are the task's."""
    name, maker, settings = read_attack(spec)
    for own in ("eps", "norm"):
        if own in settings:
            raise ConfigError(f"task.attack.{own} = {settings[own]}: give {own} to the task, the schedule moves it.")
    settings["eps"] = eps
    if "norm" in inspect.signature(maker).parameters:
        settings["norm"] = as_norm(norm)
    elif as_norm(norm).name != "linf":
        raise ConfigError(f"task.norm = {norm}, but the attack {name!r} does not let its norm be chosen.")
    if isinstance(spec, str | Mapping):
        bound: Any = attacks.bind({"use": name, **settings}, where="task.attack")
        settings = bound.keywords
    attack = partial(maker, **settings)
    attack()  # wrong settings are refused here
    return attack


def read_attack(spec: Spec) -> tuple[str, Callable[..., Threat], dict[str, Any]]:
    """The name of an attack, what makes it, and the settings that the recipe gives it."""
    if not isinstance(spec, str | Mapping):
        return getattr(spec, "__name__", "attack"), spec, {}
    name, settings = read_spec(spec, where="task.attack")
    return name, attacks.get(name, where="task.attack"), settings


class Scaled(nn.Module):
    """Under float16 autocast: larger gradients inside, multiplied where they enter and divided where they leave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(self.model(_Scale.apply(x, 1 / SCALE)).float(), SCALE)


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


# how eps grows while a model learns (Debenedetti et al. 2023, arXiv:2209.07399)


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
