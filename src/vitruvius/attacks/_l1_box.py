"""Projection onto the L1 ball within the image, exact, by sorting (Croce & Hein 2021, arXiv:2103.01208).

Each pixel may move by at most its room, 1 − x upwards or x downwards, and all together by eps:
the answer is sign(δ) · clip(|δ| − λ, 0, room) with the smallest λ ≥ 0 that fits. D pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attacks._norms import L1, per_image


def inside(x: Tensor, eps: float) -> float:
    """The radius that attacks use: x + delta rounds each of D pixels by half an ulp at most, and stays in the ball."""
    return max(eps * (1 - 1e-6) - x[:1].numel() * torch.finfo(x.dtype).eps / 4, 0.0)


def project_l1_box(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    """The delta nearest to the given one with ‖delta‖₁ ≤ eps and 0 ≤ x + delta ≤ 1."""
    room = torch.where(delta > 0, 1 - x, x)
    threshold = _threshold(delta.abs().flatten(1), room.flatten(1), eps)
    sizes = torch.minimum((delta.abs() - per_image(threshold, delta)).clamp(min=0), room)
    return (
        delta.sign() * sizes * per_image((eps / L1.length(sizes).clamp(min=1e-30)).clamp(max=1), x)
    )  # 1, but for rounding


def _threshold(sizes: Tensor, room: Tensor, eps: float) -> Tensor:
    """(B,) the λ at which Σ clip(sizes − λ, 0, room) comes down to eps; 0 where it never exceeds it.

    The sum is piecewise linear in λ: from λ = size − room on, a pixel shrinks, from λ = size on it is 0.
    Walking the sorted breakpoints upwards, `total` is the sum at each of them.
    """
    breaks, order = torch.cat([sizes - room, sizes], 1).clamp(min=0).sort(dim=1)  # (B, 2D)
    bends = torch.cat([torch.ones_like(sizes), -torch.ones_like(sizes)], 1)
    slopes = bends.gather(1, order).cumsum(1)  # (B, 2D) pixels shrinking behind each breakpoint
    falls = slopes[:, :-1] * breaks.diff(dim=1)
    at_zero = torch.minimum(sizes, room).sum(1, keepdim=True)
    total = torch.cat([at_zero, at_zero - falls.cumsum(1)], 1)  # (B, 2D), not increasing
    last = (total > eps).sum(1, keepdim=True).clamp(min=1) - 1  # the last breakpoint at which too much is left
    excess = (total.gather(1, last) - eps).clamp(min=0)
    return _refined(breaks.gather(1, last) + excess / slopes.gather(1, last).clamp(min=1), sizes, room, eps).squeeze(1)


def _refined(threshold: Tensor, sizes: Tensor, room: Tensor, eps: float) -> Tensor:
    """(B, 1) after two Newton steps, which take away what the long sums of sorted pixels have lost to rounding."""
    for _ in range(2):
        left = sizes - threshold
        shrinking = ((left > 0) & (left < room)).sum(1, keepdim=True).clamp(min=1)
        total = torch.minimum(left.clamp(min=0), room).sum(1, keepdim=True)
        threshold = (threshold + (total - eps) / shrinking).clamp(min=0)
    return threshold
