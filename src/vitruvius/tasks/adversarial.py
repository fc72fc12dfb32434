"""Adversarial training: cross-entropy at x' (Madry et al. 2018, arXiv:1706.06083), and the base of its relatives.

With one step and the step size of the final eps it is the light recipe (Debenedetti et al. 2023, arXiv:2209.07399).
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius.attacks.base import as_norm, cost_of, frozen
from vitruvius.tasks.base import Objective, Wrapped, accuracy, batch_norm_frozen, tasks
from vitruvius.tasks.inner import InnerAttack, Spec, make_schedule

Statistics = tuple[Literal["attack", "clean", "adversarial"], ...]


class Passes(Wrapped):
    """(x, x', …) → (logits, logits', …); `updating` says which passes add to the statistics of batch norms.

    One forward is what DistributedDataParallel needs when a loss looks at x and x': a second forward of a distributed
    model would overwrite the buffers that the first one's gradient still needs.
    """

    def __init__(self, model: nn.Module, updating: tuple[bool, ...]) -> None:
        super().__init__(model)
        self.updating = updating
        self.called = (model,)  # compiled or not; in a tuple: what is compiled must not be registered a second time

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.one(x, updating=updating) for x, updating in zip(inputs, self.updating, strict=False))

    def one(self, x: Tensor, *, updating: bool) -> Tensor:
        """One pass of the model, compiled if it is."""
        statistics: AbstractContextManager[None] = nullcontext() if updating else batch_norm_frozen(self.model)
        with statistics:
            logits: Tensor = self.called[0](x)
        return logits


@dataclass(eq=False, repr=False, kw_only=True)
class AdversarialObjective(Objective):
    """A loss at x'. The attack runs on the bare model, the passes of the loss on the wrapped one."""

    climbs_answers: ClassVar[bool] = False  # attack the model's own answer instead of the label
    inputs: ClassVar[tuple[str, ...]] = ("adversarial",)  # the passes of the loss, in order

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

    def __post_init__(self, model: nn.Module) -> None:
        inner = InnerAttack(
            spec=self.attack,
            final_eps=self.eps,
            norm=as_norm(self.norm),
            schedule=make_schedule(self.schedule),
            coupled=self.coupled,
            mode=self.attack_mode,
            freeze_batch_norm="attack" not in self.statistics,
            precision=self.attack_precision,
        )
        made = ("attack", *self.inputs, *(("clean",) if self.log_clean else ()))
        for name in self.statistics:
            if name == "attack" and self.attack_mode == "eval":
                raise ConfigError(
                    "task.statistics names the attack, whose passes update nothing in eval mode; "
                    "set attack_mode: train, or leave it out."
                )
            if name not in made:
                raise ConfigError(f"task.statistics names the {name} pass, which this task does not make.")
        super().__post_init__(model)
        self.inner = inner
        self.threat = (inner.norm.name, self.eps)
        self.trainable_module = Passes(model, tuple(name in self.statistics for name in self.inputs))
        self._attacked = (model,)  # in a tuple: not a child of the task

    @property
    def passes_per_image(self) -> float:
        return 3 * len(self.inputs) + self.log_clean + cost_of(self.inner.attack).total

    @property
    def radius(self) -> float:
        return self.inner.eps

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        self.inner.at(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)

    def recording_key(self) -> Hashable:
        """Whether there is an attack at all, where its radius is on the device; else the share that it has reached."""
        return self.inner.share if self.inner.on_device is None else self.inner.eps == 0

    def read_settings_from(self, device: torch.device) -> None:
        self.inner.keep_radius_on(device)

    def compile(self, backend: str = "inductor", mode: str | None = None, **settings: Any) -> nn.Module:
        """torch.compile the passes of the loss, and with `compile_attack` those of the attack."""
        passes = self.passes()
        compiled: Any = partial(torch.compile, passes.model, backend=backend, mode=mode, **settings)
        if self.compile_attack:
            self._attacked = (compiled(),)
        passes.called = (compiled(),)  # all passes share one graph
        return passes.called[0]

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The model itself: evaluation knows nothing of passes."""
        model = super().get_eval_model(module=module, ema=ema)
        return None if model is None else unwrap_model(model)

    def passes(self) -> Passes:
        """The passes inside DistributedDataParallel."""
        module: Any = self.trainable_module
        return module if isinstance(module, Passes) else module.module

    def disturb(self, x: Tensor, y: Tensor) -> Tensor:
        """x' of clean pixels (B, C, H, W), by the bare model; parameters ask for no gradient meanwhile."""
        with self.silence():
            return self.inner(
                self.passes().model, x, y, called=self._attacked[0], draws=self.draws, from_answer=self.climbs_answers
            )

    def silence(self) -> AbstractContextManager[None]:
        """No penalties of stages inside."""
        return nullcontext() if self.penalties is None else self.penalties.silent()

    def numbers(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """eps; and, if it is logged, how the model does on the images themselves."""
        read = self.inner.on_device  # where it is, a recorded step must read it there
        eps = {"eps": x.new_full((), self.inner.eps) if read is None else read[0].to(x.dtype)}
        if not self.log_clean:
            return eps
        with torch.no_grad(), frozen(self.passes().model):
            logits = self.passes().one(x, updating="clean" in self.statistics)
        return {**eps, "clean_accuracy": accuracy(logits, y)}


@dataclass(eq=False, repr=False, kw_only=True)
class TwoAnswers(AdversarialObjective):
    """A loss of the answers at x and at x', whose batch statistics both move."""

    inputs = ("clean", "adversarial")

    statistics: Statistics = key(("clean", "adversarial"), "passes that add to the running statistics of batch norms")
    log_clean: bool = field(default=False, init=False)  # the loss has the clean answer anyway

    def answers(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits (B, K) at x and at x', the same object where eps is 0; and the penalty."""
        if self.inner.eps == 0:
            (clean,), penalty = self.call_model(x)
            return clean, clean, penalty
        (clean, moved), penalty = self.call_model(x, self.disturb(x, y))
        return clean, moved, penalty


@tasks.register("adversarial")
class Adversarial(AdversarialObjective):
    """Cross-entropy at x', found by any attack of ours on the true labels."""

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.disturb(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.call_model(attacked)
        return self.total(self.criterion(output, target), output, penalty, **numbers)
