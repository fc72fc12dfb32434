"""What the FAB attacks share: the nearest point that fools the model, offered where it lies within the ball.

With a radius, an image is done with the first point within it. Without one (eps = inf) every step, target and restart
is spent on every image, and the nearest point of all is kept: the minimal-norm mode.
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

from vitruvius._dice import Dice
from vitruvius.attacks._base import Attack, Model, Work, check_at_least
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._models import logits_in_batches
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.batching import search_in_batches
from vitruvius.attacks._search.best_so_far import AttemptWatch, BestSoFar, take_chunk
from vitruvius.attacks._search.fab_step import BoundaryRules, BoundaryState, Linearise


class Attempt(NamedTuple):
    """One boundary search for every image that is not fooled yet."""

    number: int  # among all attempts, for the dice
    target: Tensor  # (B,)
    restart: int  # 0: from the image itself


@dataclass(frozen=True, kw_only=True)
class FastAdaptiveBoundary(Attack):
    """Fast adaptive boundary search with its planes and targets still to be named."""

    batches_itself: ClassVar[bool] = True
    finds_nearest: ClassVar[bool] = True

    steps: int = 100
    restarts: int = 1  # the first from the image itself, the others from random points around it
    batch_size: int | None = None  # images searched at once; default all

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "steps", "restarts")

    @abstractmethod
    def linearise(self) -> Linearise:
        """How a boundary is approximated."""

    @abstractmethod
    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Target classes (B,), one attempt after the other.

        `logits` (B, K) of the clean images; `y` (B,) their labels.
        """

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        logits = logits_in_batches(model, x, self.batch_size)
        right = (logits.argmax(1) == y).nonzero().squeeze(1)
        best = BestSoFar(x)
        best.offer(x, logits.argmax(1) != y, x.new_full((len(x),), -torch.inf))
        attempts = self._attempts(logits, y)
        watch = AttemptWatch(len(attempts), decides=not self.is_minimal)
        while attempts:
            rows = best.not_fooled()
            if self.is_minimal:
                rows = right
            if not len(rows):
                break
            chunk, attempts = take_chunk(attempts, self._room(x), len(rows))
            if self.restarts == 1:  # else an attempt depends on those before it
                chunk, attempts, rows = watch.resume(chunk, attempts, rows)
            if not len(rows):
                continue
            watch.begin(chunk, rows)
            many = rows.repeat(len(chunk))
            targets = torch.cat([attempt.target[rows] for attempt in chunk])
            start = x[rows]
            if chunk[0].restart:
                start = self._random_start(x[rows], dice[rows], chunk[0].number, -best.loss[rows])
            starts = start.repeat(len(chunk), *[1] * (x.ndim - 1))
            nearest, distance = self._walk(model, x[many], y[many], targets, starts, watch.finished)
            fooled = self._fools(distance)
            found = self._within(x[many], nearest, distance)
            if self.is_minimal:
                best.offer_each(rows, found, fooled, -distance)
            else:
                best.offer_in_turn(rows, found, fooled, -distance)
            watch.end(best)
        return best.x

    @property
    def revision(self) -> int:
        """2 without a radius: in version 0.1 the search ended with the first point that fooled the model."""
        if self.is_minimal:
            return 2
        return 1

    @property
    def is_minimal(self) -> bool:
        """No radius: the nearest point is sought, not any within the ball."""
        return math.isinf(self.eps)

    def work(self) -> Work:
        return super().work()._replace(passes=4.0)  # a gradient, and a look at where it led

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once per target, from the images themselves."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice)

    def _attempts(self, logits: Tensor, y: Tensor) -> list[Attempt]:
        attempts: list[Attempt] = []
        for target in self.targets_of(logits, y):
            for restart in range(self.restarts):
                attempts.append(Attempt(len(attempts), target, restart))
        return attempts

    def _room(self, x: Tensor) -> int:
        """Rows searched side by side; 0: attempts come one by one, since a restart depends on those before it."""
        if self.restarts > 1:
            return 0
        return self.batch_size or len(x)

    def _walk(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        start: Tensor,
        on_finish: Callable[[Tensor, Tensor, Tensor], None],
    ) -> tuple[Tensor, Tensor]:
        """The nearest point found for every image, and its distance (N,)."""
        rules = BoundaryRules(self.norm, self.eps, self.steps, self.linearise())
        nearest = x.clone()
        distance = x.new_full((len(x),), torch.inf)

        def begin(rows: Tensor) -> BoundaryState:
            return rules.begin(x[rows], y[rows], target[rows], start[rows])

        def finish(rows: Tensor, end: BoundaryState) -> None:
            nearest[rows] = end.nearest
            distance[rows] = end.distance
            on_finish(rows, self._within(x[rows], end.nearest, end.distance), self._fools(end.distance))

        every = torch.arange(len(x), device=x.device)
        search_in_batches(every, begin, partial(rules.advance, model), finish, self.batch_size, steps=self.steps)
        return nearest, distance

    def _fools(self, distance: Tensor) -> Tensor:
        """(N,) bool: whether a point that fools the model was found within the ball."""
        return (distance <= self.eps) & (distance < torch.inf)

    def _within(self, x: Tensor, nearest: Tensor, distance: Tensor) -> Tensor:
        """The nearest points, brought into the ball where they lie outside."""
        inside = per_image(distance <= self.eps, x)
        return torch.where(inside, nearest, (x + self.norm.project(nearest - x, self.eps)).clamp(0, 1))

    def _random_start(self, x: Tensor, dice: Dice, attempt: int, distance: Tensor) -> Tensor:
        """A random point at half the smaller of eps and the distance known so far."""
        limit = self.eps
        if self.is_minimal:
            limit = float(self.norm.length(torch.ones_like(x[:1])))  # from one corner of the image to the opposite one
        delta = self.norm.random(x, limit, dice, attempt)
        radius = 0.5 * distance.clamp(max=limit) / self.norm.length(delta).clamp(min=1e-12)
        return (x + per_image(radius, x) * delta).clamp(0, 1)
