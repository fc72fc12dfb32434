"""TRADES: accuracy on x, and an answer at x' that stays near the answer at x (Zhang et al. 2019, arXiv:1901.08573).

loss = C(f(x), y) + β · mean KL(p(x) ‖ p(x')), x' climbs the same divergence; gradients flow through both answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._config import key
from vitruvius._errors import ConfigError
from vitruvius.attacks.base import KL
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.targeted_pgd import TargetedPGD
from vitruvius.tasks.adversarial import TwoAnswers
from vitruvius.tasks.base import accuracy, divergence, tasks
from vitruvius.tasks.inner import Spec, bound_attack, read_attack


@tasks.register("trades")
@dataclass(eq=False, repr=False, kw_only=True)
class Trades(TwoAnswers):
    """Cross-entropy at x plus beta times the divergence between the answers at x and at x'."""

    climbs_answers = True

    beta: float = key(6.0, "weight of the divergence")

    def __post_init__(self, model: nn.Module) -> None:
        check_weight(self.beta, "task.beta")
        self.attack = climbing_divergence(self.attack, eps=self.eps, norm=self.norm)
        super().__post_init__(model)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        numbers = self.numbers(input, target)
        clean, output, penalty = self.answers(input, target)
        gap = clean.new_zeros(()) if output is clean else divergence(clean, output).mean()
        numbers |= {"clean_accuracy": accuracy(clean, target), "divergence": gap.detach()}
        return self.total(self.criterion(clean, target) + self.beta * gap, output, penalty, **numbers)


def climbing_divergence(spec: Spec, *, eps: float, norm: str) -> Spec:
    """The recipe's attack with the loss of TRADES; attacks that aim at labels or classes are refused."""
    if "loss" in read_attack(spec)[2]:
        raise ConfigError("task.attack.loss is given, but trades climbs the divergence; leave it out.")
    bound = bound_attack(spec, eps=eps, norm=norm)
    attack = bound()
    if not isinstance(attack, PGD) or isinstance(attack, TargetedPGD):
        raise ConfigError(
            f"task.attack = {type(attack).__name__}, but trades climbs the divergence from the model's own answer, "
            "which has no label and no target; use pgd."
        )
    settings = {key: value for key, value in bound.keywords.items() if key not in ("eps", "norm")}
    return partial(bound.func, **settings, loss=KL)
