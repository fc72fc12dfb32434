"""MART: images the model gets wrong anyway weigh more (Wang et al. 2020, openreview rklOg6EFwS, equation 11).

loss = BCE(p(x'), y) + β · mean KL(p(x) ‖ p(x')) · (1 − p_y(x)),  BCE = −log p_y(x') − log(1 − max_{k≠y} p_k(x')).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._config import key
from vitruvius.tasks.adversarial import TwoAnswers
from vitruvius.tasks.base import accuracy, divergence, log_probabilities, tasks


@tasks.register("mart")
@dataclass(eq=False, repr=False, kw_only=True)
class Mart(TwoAnswers):
    """Boosted cross-entropy at x' plus beta times a divergence that weighs misclassified images more."""

    beta: float = key(5.0, "weight of the divergence")
    binary: bool = field(default=False, init=False)  # equation 11 has a form of its own

    def __post_init__(self, model: nn.Module) -> None:
        check_weight(self.beta, "task.beta")
        super().__post_init__(model)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        numbers = self.numbers(input, target)
        clean, output, penalty = self.answers(input, target)
        gap = clean.new_zeros(())
        if output is not clean:
            gap = (divergence(clean, output) * doubt(clean, target)).mean()
        numbers |= {"clean_accuracy": accuracy(clean, target), "divergence": gap.detach()}
        loss = self.criterion(output, target) + runner_up(output, target)
        return self.total(loss + self.beta * gap, output, penalty, **numbers)


def runner_up(logits: Tensor, target: Tensor) -> Tensor:
    """−mean log(1 − p) of the likeliest class that is not the label, without ever forming 1 − p."""
    labels = target.argmax(1) if target.dim() == 2 else target
    logs = log_probabilities(logits)  # (B, K)
    rival = logs.detach().scatter(1, labels[:, None], -torch.inf).argmax(1)
    return -logs.scatter(1, rival[:, None], -torch.inf).logsumexp(1).mean()


def doubt(logits: Tensor, target: Tensor) -> Tensor:
    """(B,) 1 − the probability of the label; of a mixed one, its expectation."""
    probabilities = log_probabilities(logits).exp()
    if target.dim() == 2:
        return 1 - (probabilities * target).sum(1)
    return 1 - probabilities.gather(1, target[:, None]).squeeze(1)
