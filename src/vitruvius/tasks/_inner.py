"""The inner maximisation of adversarial training: any attack of ours, its eps as far as the schedule has come.

Nothing here waits for the device: checks that read tensors are made on the first batch alone. B images, K classes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._registry import read_spec
from vitruvius.attacks.base import (
    Attack,
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
from vitruvius.tasks._base import BatchDraws
from vitruvius.tasks._passes import batch_norm_frozen, evaluating, precision_of, scaled_for_half
from vitruvius.tasks._schedules import Schedule

Spec = str | dict[str, Any] | Callable[..., Threat]  # pgd:steps=1, {use: pgd, steps: 1}, or what makes a threat
Answer = Callable[[Tensor], Tensor]


class Inner:
    """x' for a batch of training images.

    `mode` and `freeze_batch_norm` say in which mode the model is attacked, `coupled` whether the step size shrinks
    with eps.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        eps: float,
        norm: str,
        schedule: Schedule,
        coupled: bool = True,
        mode: Literal["eval", "train"] = "eval",
        freeze_batch_norm: bool = True,
        precision: Literal["same", "fp32", "bf16"] = "same",
    ) -> None:
        self.final = eps
        self.norm = as_norm(norm)
        self.schedule = schedule
        self.mode = mode
        self.precision = precision
        self.freeze_batch_norm = freeze_batch_norm
        self.make_attack = bound_attack(spec, eps=eps, norm=norm)
        self.coupled = coupled
        self.step = self._fixed_step(coupled)
        self.checked = False
        self._places: Tensor | None = None  # (2,) eps and step size, where a recorded step reads them
        self.share: float | None = None  # of the final eps; not known before `at`
        self.at(epoch=0, update=0, updates_per_epoch=1)

    @property
    def threat(self) -> tuple[str, float]:
        """The norm and the radius that training leads to."""
        return self.norm.name, self.final

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Told before every batch; another attack is made only where eps has changed."""
        share = self.schedule.share(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)
        if share != self.share:
            self.share = share
            self.eps = share * self.final
            self.attack = self._made(share)

    @property
    def is_on_device(self) -> bool:
        """Whether steps read eps from a tensor, so that one recording serves every radius but 0."""
        return self._places is not None

    @property
    def radius(self) -> float | Tensor:
        """eps as it is now; a tensor where steps read it from the device."""
        if self._places is None:
            return self.eps
        return self._places[0]

    def keep_radius_on(self, device: torch.device) -> None:
        """From now on steps read eps and the step size from the device, if the attack can; their values stay."""
        if not getattr(self.attack, "radius_may_be_tensor", False):
            return
        self._places = torch.zeros(2, dtype=torch.float64, device=device)
        assert self.share is not None
        self.attack = self._made(self.share)

    def logged_eps(self, x: Tensor) -> Tensor:
        """eps as a number for the log, of x's type and on its device."""
        if self._places is None:
            return x.new_full((), self.eps)
        return self._places[0].to(x.dtype)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, called: nn.Module, draws: BatchDraws, from_answer: bool = False
    ) -> Tensor:
        """x' of x's shape; `called` is the model, or a compiled form of it.

        `from_answer`: move away from the model's own answer instead of the label. `draws` gives each
        image the key of its random numbers.
        """
        if self.eps == 0:
            return x
        with self.model_mode(model), frozen(model), torch.no_grad(), precision_of(self.precision, x):
            answer = self._checked(scaled_for_half(called, x), x, y)
            labels = full_precision(answer(x)).softmax(1) if from_answer else hard_labels(y)
            return self._search(answer, x.detach(), labels, draws.keys(x)).detach()

    def model_mode(self, model: nn.Module) -> AbstractContextManager[None]:
        """The mode of the model while it is attacked."""
        if self.mode == "eval":
            return evaluating(model)
        return batch_norm_frozen(model) if self.freeze_batch_norm else nullcontext()

    def _search(self, answer: Answer, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        attack = self.attack
        if isinstance(attack, Attack) and searches(attack):
            return attack.search(answer, x, y, attack.dice(ids))
        return disturb(self.attack, answer, x, y, ids)  # type: ignore[arg-type]

    def _checked(self, answer: nn.Module, x: Tensor, y: Tensor) -> Any:
        """On the first batch: images are pixels, labels are classes, logits are numbers."""
        if self.checked:
            return answer
        self.checked = True
        check_inputs(x, y)
        return Searched(answer, y) if searches(self.attack) else answer

    def _made(self, share: float) -> Threat:
        """The attack at a share of the final eps; its eps and step size are tensors where steps read those."""
        attack = self._with_numbers(share)
        if self._places is None:
            return attack
        assert isinstance(attack, Attack)
        moved = copy.copy(attack)
        step = 0.0
        if isinstance(attack, PGD):
            step = attack.step_length()
            object.__setattr__(moved, "step_size", self._places[1])
        object.__setattr__(moved, "eps", self._places[0])
        self._places.copy_(torch.tensor([attack.eps, step], dtype=torch.float64), non_blocking=True)
        return moved

    def _with_numbers(self, share: float) -> Threat:
        if self.step is None:
            return self.make_attack(eps=self.eps)
        if self.coupled:
            return self.make_attack(eps=self.eps, step_size=self.step * share)
        return self.make_attack(eps=self.eps, step_size=self.step)

    def _fixed_step(self, coupled: bool) -> float | None:
        """The step size at the final eps, where it must be named: one that was given, or must not shrink."""
        attack = self.make_attack()
        given: float | None = getattr(attack, "step_size", None)
        if given is not None or coupled:
            return given
        if not isinstance(attack, PGD):
            raise ConfigError(
                f"task.coupled = false, but {type(attack).__name__} has no step size of its own that could stay; "
                "use pgd, or give the attack a step_size."
            )
        return attack.step_length()


def searches(attack: Threat) -> bool:
    """Whether the attack has a search without checks; an ensemble, or a threat of somebody else, is called instead."""
    return isinstance(attack, Attack)


def bound_attack(spec: Spec, *, eps: float, norm: str) -> partial[Threat]:
    """What makes the attack, with its settings bound and checked; eps and norm are the task's."""
    maker, settings = attack_and_settings(spec)
    for key in ("eps", "norm"):
        if key in settings:
            raise ConfigError(f"task.attack.{key} = {settings[key]}: give {key} to the task, the schedule moves it.")
    settings["eps"] = eps
    if "norm" in inspect.signature(maker).parameters:
        settings["norm"] = as_norm(norm)
    elif norm != "linf":
        raise ConfigError(f"task.norm = {norm}, but the attack {_name(spec)!r} does not let its norm be chosen.")
    if isinstance(spec, str | Mapping):
        bound: Any = attacks.bind({"use": _name(spec), **settings}, where="task.attack")
        settings = bound.keywords
    made = partial(maker, **settings)
    made()  # wrong settings are refused here
    return made


def attack_and_settings(spec: Spec) -> tuple[Callable[..., Threat], dict[str, Any]]:
    """What makes the attack, and the settings that the recipe gives it."""
    if not isinstance(spec, str | Mapping):
        return spec, {}
    name, settings = read_spec(spec, where="task.attack")
    return attacks.get(name, where="task.attack"), settings


def _name(spec: Spec) -> str:
    if isinstance(spec, str | Mapping):
        return read_spec(spec, where="task.attack")[0]
    return getattr(spec, "__name__", "attack")
