"""Which wrong classes a targeted attack aims at: several in the order of their logits, or one by a rule.

B images, K classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitruvius._dice import Dice


def likeliest_classes(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """(B, T) wrong classes by falling logit; T = count, or all K − 1 where there are fewer."""
    wrong = logits.scatter(1, y[:, None], -torch.inf)
    return wrong.argsort(dim=1, descending=True)[:, : min(count, logits.shape[1] - 1)]


def random_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes drawn evenly from those that are not the label."""
    other = dice.integers("target", logits.shape[1] - 1)
    return other + (other >= y)


def least_likely_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes of the smallest logit that is not the label's."""
    return logits.scatter(1, y[:, None], torch.inf).argmin(1)


def likeliest_class(logits: Tensor, y: Tensor, dice: Dice) -> Tensor:
    """(B,) classes of the largest logit that is not the label's."""
    return logits.scatter(1, y[:, None], -torch.inf).argmax(1)


TARGETS: dict[str, Callable[[Tensor, Tensor, Dice], Tensor]] = {
    "random": random_class,
    "least_likely": least_likely_class,
    "likeliest": likeliest_class,
}
