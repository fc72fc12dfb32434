"""Gradient alignment: 1 − cos(∇ₓ ℓ(x), ∇ₓ ℓ(x + η)), η random in the ball (Andriushchenko & Flammarion 2020).

Its gradient needs second derivatives: attention is computed the plain way, since fused kernels have none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius.attacks import CE, Dice, Norm
from vitruvius.attacks._losses import hard_labels


def misalignment(model: nn.Module, x: Tensor, y: Tensor, *, norm: Norm, eps: float) -> Tensor:
    """Mean over the images, differentiable with respect to the parameters."""
    dice = Dice(torch.randint(2**62, (len(x),), device=x.device), owner="alignment")
    with sdpa_kernel(SDPBackend.MATH):
        here = _gradient(model, x, y)
        there = _gradient(model, (x + norm.random(x, eps, dice)).clamp(0, 1), y)
    return 1 - F.cosine_similarity(here.flatten(1), there.flatten(1)).mean()


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(B, C, H, W), with a graph of its own."""
    x = x.detach().requires_grad_()
    loss = CE(model(x).float() if x.dtype == torch.float32 else model(x), hard_labels(y)).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return grad
