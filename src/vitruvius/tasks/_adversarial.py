"""What adversarial objectives share: x' from the inner attack, passes through the model, numbers for the log."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius.attacks import frozen
from vitruvius.tasks._base import Objective
from vitruvius.tasks._inner import Inner, Spec
from vitruvius.tasks._losses import Criterion, accuracy
from vitruvius.tasks._passes import Passes
from vitruvius.tasks._schedules import make_schedule

Statistics = tuple[Literal["attack", "clean", "adversarial"], ...]


@dataclass(eq=False, repr=False)
class AdversarialObjective(Objective):
    """A loss at x'. The attack runs on the bare model, the passes of the loss on the wrapped one.

    The fields are the settings. A subclass is a dataclass too: it inherits them, adds its own, and takes one away by
    giving its value with `field(init=False)`.
    """

    climbs_answers: ClassVar[bool] = False  # attack the model's own answer instead of the label
    inputs: ClassVar[tuple[str, ...]] = ("adversarial",)  # the passes of the loss, in order

    model: InitVar[nn.Module]
    _: KW_ONLY
    eps: float = required("radius of the attack at the end of the schedule, for pixels in [0, 1]")
    norm: str = key("linf", "linf, l2 or l1")
    attack: Spec = key("pgd", "the inner attack: pgd:steps=1, or {use: pgd, steps: 1}; its eps and norm are the task's")
    schedule: str | dict[str, Any] = key("constant", "how eps grows: constant, linear:epochs=10, or {use: sine, …}")
    coupled: bool = key(True, "the step size shrinks with eps; false: it is that of the final eps")
    attack_mode: Literal["eval", "train"] = key("eval", "mode of the model while it is attacked")
    attack_precision: Literal["same", "fp32", "bf16"] = key("same", "precision of the attack; same: as train.precision")
    compile_attack: bool = key(True, "compile the passes of the attack too, where train.compile compiles the model")
    statistics: Statistics = key(("adversarial",), "passes that add to the running statistics of batch norms")
    log_clean: bool = key(False, "log accuracy on clean images too, for one more pass")
    smoothing: float = key(0.0, "label smoothing of hard labels; the data's if the recipe does not say")
    binary: bool = key(False, "binary cross-entropy for each class instead of cross-entropy over the classes")
    penalty: float = key(0.0, "weight of the penalties of attention stages such as low_rank")

    def __post_init__(self, model: nn.Module) -> None:
        inner = Inner(
            self.attack,
            eps=self.eps,
            norm=self.norm,
            schedule=make_schedule(self.schedule),
            coupled=self.coupled,
            mode=self.attack_mode,
            freeze_batch_norm="attack" not in self.statistics,
            precision=self.attack_precision,
        )
        check_statistics(self.statistics, inner, {*self.inputs, *(("clean",) if self.log_clean else ())})
        super().__init__(model, Criterion(smoothing=self.smoothing, binary=self.binary), penalty=self.penalty)
        self.inner = inner
        self.threat = inner.threat
        self.trainable_module = Passes(model, tuple(name in self.statistics for name in self.inputs))
        self._attacked = (model,)  # in a tuple: not a child of the task

    @property
    def radius(self) -> float:
        """eps, as far as the schedule has come."""
        return self.inner.eps

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Told before every batch: how far training has come."""
        self.inner.at(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)

    def recording_key(self) -> Hashable:
        """Whether there is an attack at all, where its radius is on the device; else the share that it has reached."""
        if self.inner.is_on_device:
            return self.inner.eps == 0
        return self.inner.share

    def read_settings_from(self, device: torch.device) -> None:
        """The radius of the attack, and its step size."""
        self.inner.keep_radius_on(device)

    def compile(self, backend: str = "inductor", mode: str | None = None, **settings: Any) -> nn.Module:
        """torch.compile the passes of the loss, and with `compile_attack` those of the attack.

        `backend` and `mode` are torch.compile's, by default those that torch chooses; `settings` whatever else it
        takes.
        """
        passes = self.passes()
        if self.compile_attack:
            self._attacked = (torch.compile(passes.model, backend=backend, mode=mode, **settings),)  # type: ignore[assignment]
        return passes.compile_inside(backend=backend, mode=mode, **settings)

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The model itself: evaluation knows nothing of passes.

        `module` and `ema` are as timm's loop passes them on.
        """
        found = super().get_eval_model(module=module, ema=ema)
        return None if found is None else unwrap_model(found)

    def passes(self) -> Passes:
        """The passes inside DistributedDataParallel."""
        module = self.trainable_module
        found = module if isinstance(module, Passes) else module.module
        assert isinstance(found, Passes)
        return found

    def disturb(self, x: Tensor, y: Tensor) -> Tensor:
        """x', by the bare model; parameters ask for no gradient meanwhile.

        `x` (B, C, H, W) are clean pixels, `y` (B,) or (B, K) their labels.
        """
        with self.silence():
            return self.inner(
                self.passes().model, x, y, called=self._attacked[0], draws=self.draws, from_answer=self.climbs_answers
            )

    def silence(self) -> AbstractContextManager[None]:
        """No penalties of stages inside."""
        return nullcontext() if self.penalties is None else self.penalties.silent()

    def numbers(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """eps; and, if it is logged, how the model does on the images themselves.

        `x` (B, C, H, W) are clean pixels, `y` (B,) or (B, K) their labels.
        """
        eps = {"eps": self.inner.logged_eps(x)}
        if not self.log_clean:
            return eps
        with torch.no_grad(), frozen(self.passes().model):
            logits = self.passes().one(x, updating="clean" in self.statistics)
        return {**eps, "clean_accuracy": accuracy(logits, y)}


def check_statistics(statistics: Statistics, inner: Inner, made: set[str]) -> None:
    """Refuse passes that are never made, or cannot update anything."""
    for name in statistics:
        if name == "attack" and inner.mode == "eval":
            raise ConfigError(
                "task.statistics names the attack, whose passes update nothing in eval mode; "
                "set attack_mode: train, or leave it out."
            )
        if name != "attack" and name not in made:
            raise ConfigError(f"task.statistics names the {name} pass, which this task does not make.")
