"""Which wrong classes a targeted attack aims at: those the clean image most resembles. B images, K classes."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attacks._base import Model
from vitruvius.attacks._models import full_precision


def clean_logits(model: Model, x: Tensor, batch_size: int | None = None) -> Tensor:
    """(B, K) logits, `batch_size` images at a time."""
    return torch.cat([full_precision(model(part)) for part in x.split(batch_size or max(len(x), 1))])


def likeliest(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """(B, T) wrong classes by falling logit; T = count, or all K − 1 where there are fewer."""
    wrong = logits.scatter(1, y[:, None], -torch.inf)
    return wrong.argsort(dim=1, descending=True)[:, : min(count, logits.shape[1] - 1)]
