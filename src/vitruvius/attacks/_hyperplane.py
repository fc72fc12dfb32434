"""Shortest way from an image to a hyperplane without leaving the image (Croce & Hein 2020, arXiv:1907.02044).

Smallest δ with ⟨w, x + δ⟩ = b and 0 ≤ x + δ ≤ 1, in Linf, L2 and L1; where the plane is out of reach, the corner of
the image that comes nearest to it. Tensors are (B, D): D pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attacks._norms import Norm


def project_to_plane(norm: Norm, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """δ (B, D) for images (B, D), normals (B, D) and offsets (B,)."""
    gap = (w * x).sum(1) - b  # to be closed by moving against its sign
    direction = -torch.where(gap[:, None] < 0, -w, w).sign()
    room = torch.where(direction > 0, 1 - x, x)
    moves = {"linf": _evenly, "l2": _by_slope, "l1": _steepest_first}[norm.name]
    return direction * moves(w.abs(), room, gap.abs())


def _evenly(w: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """All pixels move as far as each other, or as far as they can."""
    return torch.minimum(_time_to_close(w, room, gap)[:, None], room)


def _by_slope(w: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """Pixels move in proportion to their weight, or as far as they can."""
    times = room / w.clamp(min=torch.finfo(w.dtype).tiny)  # when each one reaches the edge
    return torch.minimum(_time_to_close(w * w, times, gap)[:, None] * w, room)


def _time_to_close(speed: Tensor, times: Tensor, gap: Tensor) -> Tensor:
    """(B,) the t at which Σ speed · min(t, times) reaches the gap; the last of `times` where it never does."""
    times, order = times.sort(dim=1)
    speed = speed.gather(1, order)
    remaining = speed.flip(1).cumsum(1).flip(1)  # (B, D) total speed until each time
    spans = torch.cat([times[:, :1], times.diff(dim=1)], 1)
    closed = (remaining * torch.where(remaining > 0, spans, 0.0)).cumsum(1)  # (B, D) gap closed at each time
    first = (closed < gap[:, None]).sum(1, keepdim=True).clamp(max=times.shape[1] - 1)
    before = torch.where(first > 0, closed.gather(1, (first - 1).clamp(min=0)), 0.0)
    begun = torch.where(first > 0, times.gather(1, (first - 1).clamp(min=0)), 0.0)
    pace = remaining.gather(1, first)
    time = begun + (gap[:, None] - before) / pace.clamp(min=torch.finfo(pace.dtype).tiny)
    return torch.minimum(time, times.gather(1, first)).squeeze(1)


def _steepest_first(w: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """One pixel after the other to its edge, largest weight first, until the gap is closed."""
    order = w.argsort(dim=1, descending=True)
    w, room = w.gather(1, order), room.gather(1, order)
    before = (w * room).cumsum(1) - w * room
    moves = ((gap[:, None] - before).clamp(min=0) / w.clamp(min=torch.finfo(w.dtype).tiny)).minimum(room)
    return torch.zeros_like(moves).scatter(1, order, moves)
