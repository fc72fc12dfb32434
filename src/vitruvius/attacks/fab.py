"""Fast adaptive boundary search (FAB): the nearest point that fools the model, offered where it lies within the ball.

Croce & Hein 2020, arXiv:1907.02044, algorithm 1: step to the linearised boundary, lean toward the image, move back when
outside. The projection onto a hyperplane within the image is in its appendix: the smallest δ with ⟨w, x + δ⟩ = b and
0 ≤ x + δ ≤ 1, in Linf, L2 and L1; where the plane is out of reach, the corner of the image that comes nearest to it.

With a radius, an image is done with the first point within it. Without one (eps = inf) every step, target and restart
is spent on every image, and the nearest point of all is kept: the minimal-norm mode.

B images, K classes, D pixels; N images of one attempt.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitruvius._progress import Progress, part_of
from vitruvius._random import Dice
from vitruvius.attacks._batching import BestSoFar, attempts_in_turn, search_in_batches
from vitruvius.attacks._models import (
    full_precision,
    logits_in_batches,
    note_grad,
    progress_of,
    unwrapped,
)
from vitruvius.attacks.base import Attack, Cost, Model, attacks
from vitruvius.attacks.losses import hard_labels
from vitruvius.attacks.norms import Norm, in_order, per_image

IMAGE_WEIGHT = 0.1  # largest weight of the image's own projection
OVERSHOOT = 1.05  # of steps beyond the linearised boundary
BACKWARD = 0.9  # toward the image, from points that fool the model


@dataclass(frozen=True, kw_only=True)
class FastAdaptiveBoundary(Attack):
    """Fast adaptive boundary search with its planes and targets still to be named."""

    finds_nearest: ClassVar[bool] = True

    steps: int = 100
    restarts: int = 1  # the first from the image itself, the others from random points around it
    batch_size: int | None = None  # images searched at once; default all

    @abstractmethod
    def linearise(self, model: Model, point: Tensor, y: Tensor, target: Tensor) -> Plane:
        """The boundary near a point (B, …), approximated by a plane."""

    @abstractmethod
    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Target classes (B,), one attempt after the other."""

    @property
    def is_minimal(self) -> bool:
        """No radius: the nearest point is sought, not any within the ball."""
        return math.isinf(self.eps)

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        logits = logits_in_batches(model, x, self.batch_size)
        right = (logits.argmax(1) == y).nonzero().squeeze(1)
        best = BestSoFar(x)
        best.offer(x, logits.argmax(1) != y, x.new_full((len(x),), -torch.inf))
        size, made = self.batch_size or len(x), 0
        together = size if self.restarts == 1 else 0  # a restart depends on the attempts before it
        left = (lambda: right) if self.is_minimal else best.not_fooled
        for rows, chunk, more, words in attempts_in_turn(self.targets_of(logits, y), self.restarts, together, left):
            many = rows.repeat(len(chunk))
            target = torch.cat([attempt.target[rows] for attempt in chunk])
            start = x[rows]
            if chunk[0].restart:
                start = self._random_start(x[rows], dice[rows], chunk[0].number, -best.loss[rows])
            starts = start.repeat(len(chunk), *[1] * (x.ndim - 1))
            later = more * math.ceil(len(many) / size) * self.steps
            progress = part_of(progress_of(model), made, later, words)
            nearest, distance, steps = self._walk(model, x[many], y[many], target, starts, progress)
            made += steps
            points = self._within(x[many], nearest, distance)
            best.offer_attempts(rows, points, self._fools(distance), -distance, in_turn=not self.is_minimal)
        return best.x

    def cost(self) -> Cost:
        return super().cost()._replace(passes=4.0)  # a gradient, and a look at where it led

    def refine(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once per target, from the images themselves."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice)

    def _walk(
        self, model: Model, x: Tensor, y: Tensor, target: Tensor, start: Tensor, progress: Progress
    ) -> tuple[Tensor, Tensor, int]:
        """The nearest point found for every image, its distance (N,), and the steps that were made."""
        rules = BoundaryRules(self.norm, self.eps, self.steps, self.linearise)
        nearest = x.clone()
        distance = x.new_full((len(x),), torch.inf)

        def begin(rows: Tensor) -> BoundaryState:
            return rules.begin(x[rows], y[rows], target[rows], start[rows])

        def finish(rows: Tensor, end: BoundaryState) -> Tensor:
            nearest[rows] = end.nearest
            distance[rows] = end.distance
            return self._fools(end.distance)

        every = torch.arange(len(x), device=x.device)
        advance = partial(rules.advance, model)
        steps = search_in_batches(every, begin, advance, finish, self.batch_size, steps=self.steps, progress=progress)
        return nearest, distance, steps

    def _fools(self, distance: Tensor) -> Tensor:
        """(N,) bool: whether a point that fools the model was found within the ball."""
        return (distance <= self.eps) & (distance < torch.inf)

    def _within(self, x: Tensor, nearest: Tensor, distance: Tensor) -> Tensor:
        """The nearest points, brought into the ball where they lie outside."""
        inside = per_image(distance <= self.eps, x)
        return torch.where(inside, nearest, (x + self.norm.project(nearest - x, self.eps)).clamp(0, 1))

    def _random_start(self, x: Tensor, dice: Dice, attempt: int, distance: Tensor) -> Tensor:
        """A random point at half the smaller of eps and the distance known so far."""
        diagonal = float(self.norm.length(torch.ones_like(x[:1])))  # from one corner of the image to the opposite one
        limit = diagonal if self.is_minimal else self.eps
        delta = self.norm.random(x, limit, dice, attempt)
        radius = 0.5 * distance.clamp(max=limit) / self.norm.length(delta).clamp(min=1e-12)
        return (x + per_image(radius, x) * delta).clamp(0, 1)


@attacks.register("fab")
@dataclass(frozen=True, kw_only=True)
class FAB(FastAdaptiveBoundary):
    """Fast adaptive boundary attack toward whichever class is nearest: a gradient for each class and step.

    It looks for the nearest point that fools the model: a step to the linearised boundary, drawn toward the image, and
    a move back toward the image wherever the model is fooled.

    Settings beside norm and seed:
    `eps`: an image is done with the first point within it; inf: the nearest point that all steps and restarts find.
    `steps`: of a search.
    `restarts`: the first from the image itself, the others from random points around it.
    `batch_size`: images searched at once; default all.

    It needs one backward pass per class and step: with many classes, `fab_targeted` is faster.
    """

    def linearise(self, model: Model, point: Tensor, y: Tensor, target: Tensor) -> Plane:
        """Toward the class whose linearised boundary is nearest."""
        heights, normals = zip(*boundaries(model, point, y), strict=True)
        height = torch.stack(heights, 1)  # (B, K)
        steepness = torch.stack([dual_length(self.norm, normal) for normal in normals], 1)
        distance = (height.abs() / (steepness + 1e-12)).scatter(1, y[:, None], torch.inf)
        nearest = distance.argmin(1)
        normal = torch.stack(normals)[nearest, torch.arange(len(y), device=y.device)]
        return Plane(height.gather(1, nearest[:, None]).squeeze(1), normal)

    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield y


class Plane(NamedTuple):
    """The linearised boundary {z : height + ⟨normal, z − point⟩ = 0} at a point."""

    height: Tensor  # (B,)
    normal: Tensor


Linearise = Callable[[Model, Tensor, Tensor, Tensor], Plane]  # (model, point, y, target)


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

    def advance(self, model: Model, s: BoundaryState) -> BoundaryState:
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


def boundaries(model: Model, point: Tensor, y: Tensor, candidates: Tensor | None = None) -> Iterator[Plane]:
    """The linearised boundaries toward the candidates (B, C), else all classes: one backward pass each."""
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        logits = full_precision(unwrapped(model)(point))  # a compiled backward pass can be walked only once
        chosen = logits if candidates is None else logits.gather(1, candidates)
        heights = chosen - logits.gather(1, y[:, None])  # (B, C)
        columns = heights.sum(0).unbind()
    for number, column in enumerate(columns):
        (normal,) = torch.autograd.grad(column, point, retain_graph=True)
        note_grad(model, normal)
        yield Plane(heights[:, number].detach().to(point), normal)


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
    times, order = in_order(times)
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
