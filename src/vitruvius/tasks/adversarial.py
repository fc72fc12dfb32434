"""Adversarial training: cross-entropy at x' (Madry et al. 2018, arXiv:1706.06083).

With one step and the step size of the final eps it is the light recipe (Debenedetti et al. 2023, arXiv:2209.07399).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from vitruvius.tasks._adversarial import AdversarialObjective, Statistics, make_inner
from vitruvius.tasks._base import tasks
from vitruvius.tasks._inner import Spec
from vitruvius.tasks._losses import Criterion


@tasks.register("adversarial")
class Adversarial(AdversarialObjective):
    """Cross-entropy at x', found by any attack of ours on the true labels."""

    def __init__(
        self,
        model: nn.Module,
        *,
        eps: float,
        norm: str = "linf",
        attack: Spec = "pgd",
        schedule: str | dict[str, Any] = "constant",
        coupled: bool = True,
        attack_mode: Literal["eval", "train"] = "eval",
        attack_precision: Literal["same", "fp32", "bf16"] = "same",
        compile_attack: bool = True,
        statistics: Statistics = ("adversarial",),
        log_clean: bool = False,
        smoothing: float = 0.0,
        binary: bool = False,
        penalty: float = 0.0,
    ) -> None:
        inner = make_inner(
            attack,
            eps=eps,
            norm=norm,
            schedule=schedule,
            coupled=coupled,
            attack_mode=attack_mode,
            attack_precision=attack_precision,
            statistics=statistics,
        )
        super().__init__(
            model,
            Criterion(smoothing=smoothing, binary=binary),
            inner,
            penalty=penalty,
            statistics=statistics,
            log_clean=log_clean,
            compile_attack=compile_attack,
        )

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.attack(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.ask(attacked)
        return self.total(self.criterion(output, target), output, penalty, **numbers)
