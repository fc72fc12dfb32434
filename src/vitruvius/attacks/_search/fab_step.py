"""Fast adaptive boundary search: step to the linearised boundary, lean toward the image, move back when outside.

Croce & Hein 2020, arXiv:1907.02044, algorithm 1; the projection onto a hyperplane within the image is in its appendix:
the smallest δ with ⟨w, x + δ⟩ = b and 0 ≤ x + δ ≤ 1, in Linf, L2 and L1; where the plane is out of reach, the corner of
the image that comes nearest to it. B images, K classes, D pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius.attacks._losses import TARGETED_MARGIN
from vitruvius.attacks._models import full_precision, loss_and_grad, note_grad, unwrapped
from vitruvius.attacks._norms import Norm, per_image

IMAGE_WEIGHT = 0.1  # largest weight of the image's own projection
OVERSHOOT = 1.05  # of steps beyond the linearised boundary
BACKWARD = 0.9  # toward the image, from points that fool the model


class Plane(NamedTuple):
    """The linearised boundary {z : height + ⟨normal, z − point⟩ = 0} at a point."""

    height: Tensor  # (B,)
    normal: Tensor


Linearise = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], Plane]  # (model, point, y, target)


class BoundaryState(NamedTuple):
    """How far the boundary searches of B images have come."""

    x: Tensor
    y: Tensor  # (B,)
    target: Tensor  # (B,)
    point: Tensor
    nearest: Tensor  # that fools the model
    distance: Tensor  # (B,) to it; inf before one is found
    iteration: Tensor  # (B,)
    done: Tensor  # (B,) bool


class BoundaryRules(NamedTuple):
    """The rules of a boundary search; it ends early once the distance is within eps, if that is finite."""

    norm: Norm
    eps: float
    steps: int
    linearise: Linearise

    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> BoundaryState:
        never = x.new_full((len(x),), torch.inf)
        return BoundaryState(x, y, target, start, x, never, torch.zeros_like(y), torch.zeros_like(y, dtype=torch.bool))

    def advance(self, model: Callable[[Tensor], Tensor], s: BoundaryState) -> BoundaryState:
        """One step to the boundary and one look at where it led."""
        point = self._step(s, self.linearise(model, s.point, s.y, s.target))
        fooled = full_precision(model(point)).argmax(1) != s.y
        distance = self.norm.length(point - s.x)
        nearer = fooled & (distance < s.distance)
        s = s._replace(
            nearest=torch.where(per_image(nearer, s.x), point, s.nearest),
            distance=torch.where(nearer, distance, s.distance),
            point=torch.where(per_image(fooled, s.x), s.x + BACKWARD * (point - s.x), point),
            iteration=s.iteration + 1,
        )
        done = s.iteration >= self.steps
        if not math.isinf(self.eps):
            done = done | (s.distance <= self.eps)
        return s._replace(done=done)

    def _step(self, s: BoundaryState, plane: Plane) -> Tensor:
        """Between the projections of the point and of the image, nearer to the one that is nearer to the plane."""
        w = plane.normal.flatten(1)
        point = s.point.flatten(1)
        x = s.x.flatten(1)
        b = (w * point).sum(1) - plane.height
        both = project_to_plane(self.norm, torch.cat([point, x]), torch.cat([w, w]), torch.cat([b, b]))
        here, there = both.chunk(2)
        near = self.norm.length(here).clamp(min=1e-8)
        far = self.norm.length(there).clamp(min=1e-8)
        lean = (near / (near + far)).clamp(max=IMAGE_WEIGHT)[:, None]
        mixed = (1 - lean) * (point + OVERSHOOT * here) + lean * (x + OVERSHOOT * there)
        return mixed.clamp(0, 1).view_as(s.x)


def toward_target(model: Callable[[Tensor], Tensor], point: Tensor, y: Tensor, target: Tensor) -> Plane:
    """Where the logits of target and label meet."""
    here = loss_and_grad(model, point, lambda logits: TARGETED_MARGIN(logits, y, target))
    return Plane(here.loss, here.grad)


@dataclass(frozen=True)
class Nearest:
    """Linearise toward the class whose linearised boundary is nearest: one gradient per class."""

    norm: Norm

    def __call__(self, model: Callable[[Tensor], Tensor], point: Tensor, y: Tensor, target: Tensor) -> Plane:
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            heights = full_precision(unwrapped(model)(point))  # a compiled backward pass can be walked only once
            heights = heights - heights.gather(1, y[:, None])  # (B, K)
            columns = heights.sum(0)
            normals = [torch.autograd.grad(column, point, retain_graph=True)[0] for column in columns]
        for normal in normals:
            note_grad(model, normal)
        heights = heights.detach()
        steepness = torch.stack([dual_length(self.norm, normal) for normal in normals], 1)  # (B, K)
        distance = (heights.abs() / (steepness + 1e-12)).scatter(1, y[:, None], torch.inf)
        nearest = distance.argmin(1)
        normal = torch.stack(normals)[nearest, torch.arange(len(y), device=y.device)]
        return Plane(heights.gather(1, nearest[:, None]).squeeze(1), normal)


def boundaries(model: Callable[[Tensor], Tensor], point: Tensor, y: Tensor, candidates: Tensor) -> Iterator[Plane]:
    """The linearised boundaries toward the candidates (B, C), one after the other: one backward pass each."""
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        logits = full_precision(unwrapped(model)(point))  # a compiled backward pass can be walked only once
        heights = logits.gather(1, candidates) - logits.gather(1, y[:, None])  # (B, C)
        columns = heights.sum(0).unbind()
    for number, column in enumerate(columns):
        (normal,) = torch.autograd.grad(column, point, retain_graph=True)
        note_grad(model, normal)
        yield Plane(heights[:, number].detach(), normal)


def dual_length(norm: Norm, grad: Tensor) -> Tensor:
    """(B,) largest change of a linear function over a unit step in the norm."""
    order = {"linf": 1.0, "l2": 2.0, "l1": torch.inf}[norm.name]
    return torch.linalg.vector_norm(grad.flatten(1), order, dim=1)


def project_to_plane(norm: Norm, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """δ (B, D) for images (B, D), normals (B, D) and offsets (B,)."""
    gap = (w * x).sum(1) - b  # to be closed by moving against its sign
    direction = -torch.where(gap[:, None] < 0, -w, w).sign()
    room = torch.where(direction > 0, 1 - x, x)
    moves = {"linf": _evenly, "l2": _by_weight, "l1": _steepest_first}[norm.name]
    return direction * moves(w.abs(), room, gap.abs())


def _evenly(w: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """All pixels move as far as each other, or as far as they can."""
    return torch.minimum(_time_to_close(w, room, gap)[:, None], room)


def _by_weight(w: Tensor, room: Tensor, gap: Tensor) -> Tensor:
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
    w = w.gather(1, order)
    room = room.gather(1, order)
    before = (w * room).cumsum(1) - w * room
    moves = ((gap[:, None] - before).clamp(min=0) / w.clamp(min=torch.finfo(w.dtype).tiny)).minimum(room)
    return torch.zeros_like(moves).scatter(1, order, moves)
