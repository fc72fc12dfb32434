"""Losses that several tasks share: cross-entropy on any labels, and the divergence between two answers.

B images, K classes; labels (B,) or distributions (B, K).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError


class Criterion(nn.Module):
    """Cross-entropy, or binary cross-entropy a class, on labels (B) or distributions (B, K).

    `smoothing` is the share of label that is spread over all classes (default 0).

    `binary` takes binary cross-entropy for each class instead (default: no).
    """

    def __init__(self, *, smoothing: float = 0.0, binary: bool = False) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ConfigError(f"task.smoothing = {smoothing}, expected a number from 0 to below 1.")
        self.smoothing, self.binary = smoothing, binary

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss () of `logits` (B, K) against `target`, (B,) labels or (B, K) distributions."""
        if not self.binary:
            return F.cross_entropy(logits, target, label_smoothing=self.smoothing if target.dim() == 1 else 0.0)
        if target.dim() == 1:
            target = F.one_hot(target, logits.shape[1]).to(logits)
            target = target * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return F.binary_cross_entropy_with_logits(logits, target)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """(B,) KL(softmax(`logits`) ‖ softmax(`other`)); gradients flow through both."""
    p, q = log_probabilities(logits), log_probabilities(other)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(1)


def log_probabilities(logits: Tensor) -> Tensor:
    """(B, K) in float32 at least, also under autocast."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """The share of images whose largest logit is the label's; a mixed label counts as its largest part.

    `logits` (B, K); `target` (B,) labels or (B, K) distributions.
    """
    labels = target.argmax(1) if target.dim() == 2 else target
    return (logits.detach().argmax(1) == labels).float().mean()
