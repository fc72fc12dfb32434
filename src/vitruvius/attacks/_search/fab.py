"""What the FAB attacks share: the nearest point that fools the model, offered where it lies within the ball."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.attacks._base import Attack, Model
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.batching import search_in_batches
from vitruvius.attacks._search.best_so_far import BestSoFar, take_chunk
from vitruvius.attacks._search.fab_step import BoundaryRules, BoundaryState, Linearise
from vitruvius.attacks._search.targets import clean_logits


@dataclass(frozen=True, kw_only=True)
class FastAdaptiveBoundary(Attack):
    """Fast adaptive boundary search with its planes and targets still to be named."""

    steps: int = 100
    restarts: int = 1  # the first from the image itself, the others from random points around it
    batch_size: int | None = None  # images searched at once; default all

    @abstractmethod
    def linearise(self) -> Linearise:
        """How a boundary is approximated."""

    @abstractmethod
    def targets_of(self, logits: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Target classes (B,), one attempt after the other."""

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        logits = clean_logits(model, x, self.batch_size)
        best = BestSoFar(x)
        best.offer(x, logits.argmax(1) != y, x.new_full((len(x),), -torch.inf))
        attempts = list(enumerate(product(self.targets_of(logits, y), range(self.restarts))))
        room = (self.batch_size or len(x)) if self.restarts == 1 else 0  # a restart depends on the attempts before it
        while attempts and len(rows := best.not_fooled()):
            now, attempts = take_chunk(attempts, room, len(rows))
            number, (_, restart) = now[0]
            start = self._start(x[rows], dice[rows], number, -best.loss[rows]) if restart else x[rows]
            many, targets = rows.repeat(len(now)), torch.cat([target[rows] for _, (target, _) in now])
            nearest, distance = self._walk(
                model, x[many], y[many], targets, start.repeat(len(now), *[1] * (x.ndim - 1))
            )
            found = self._within(x[many], nearest, distance)
            best.offer_in_turn(rows, found, distance <= self.eps, -distance)
        return best.x

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once a target, from the images themselves."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice)

    def _walk(self, model: Model, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest point found for every image, and its distance (N,)."""
        rules = BoundaryRules(self.norm, self.eps, self.steps, self.linearise())
        nearest, distance = x.clone(), x.new_full((len(x),), torch.inf)

        def begin(rows: Tensor) -> BoundaryState:
            return rules.begin(x[rows], y[rows], target[rows], start[rows])

        def finish(rows: Tensor, end: BoundaryState) -> None:
            nearest[rows], distance[rows] = end.nearest, end.distance

        every = torch.arange(len(x), device=x.device)
        search_in_batches(every, begin, lambda walk: rules.advance(model, walk), finish, self.batch_size)
        return nearest, distance

    def _within(self, x: Tensor, nearest: Tensor, distance: Tensor) -> Tensor:
        """The nearest points, brought into the ball where they lie outside."""
        inside = per_image(distance <= self.eps, x)
        return torch.where(inside, nearest, (x + self.norm.project(nearest - x, self.eps)).clamp(0, 1))

    def _start(self, x: Tensor, dice: Dice, attempt: int, distance: Tensor) -> Tensor:
        """A random point at half the smaller of eps and the distance known so far."""
        delta = self.norm.random(x, self.eps, dice, attempt)
        radius = 0.5 * distance.clamp(max=self.eps) / self.norm.length(delta).clamp(min=1e-12)
        return (x + per_image(radius, x) * delta).clamp(0, 1)
