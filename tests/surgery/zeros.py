"""Cores for tests: one that forgets everything, one that disturbs a single head."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attention import Kernel
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site


class Zeros(Kernel):
    """Returns zeros: what remains is a model without attention."""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        return torch.zeros_like(attend(heads))


class Disturbed(Kernel):
    """Softmax attention, with one added to all that the first head says."""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        out = attend(heads).clone()
        out[:, 0] += 1
        return out
