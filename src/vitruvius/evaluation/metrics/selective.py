"""AURRA: the area under the curve of accuracy over response rate (Hendrycks et al. 2021, arXiv:1907.07174).

A model that may stay silent on its least confident images answers the others; n images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.evaluation.metrics._checks import checked


def aurra(confidence: Tensor, correct: Tensor) -> float:
    """Mean over k = 1 … n of the accuracy on the k most confident images."""
    confidence, correct = checked(confidence=confidence, correct=correct)
    right = correct[confidence.argsort(descending=True, stable=True)].cumsum(0)  # (n,)
    return float((right / torch.arange(1, len(right) + 1, dtype=torch.float64)).mean())
