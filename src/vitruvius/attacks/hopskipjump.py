"""HopSkipJump: walks along the decision boundary, seeing only predicted classes (Chen et al. 2020, arXiv:1904.02144).

Every round estimates the normal of the boundary from the answers around a point of it, steps along it, and
returns to the boundary on the way to the image. B images of D pixels, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import tell_step
from vitruvius.attacks.base import Attack, Cost, Model, attacks
from vitruvius.attacks.losses import hard_labels
from vitruvius.attacks.norms import L2, Norm, per_image

Fools = Callable[[Tensor], Tensor]  # points (B, ...) → (B,) bool
TRIES = 50  # random images tried for a first point that fools the model
HALVINGS = 12  # of a step that leads back


@attacks.register("hopskipjump")
@dataclass(frozen=True, kw_only=True)
class HopSkipJump(Attack):
    """Decision-based: the nearest point that fools the model, found from predicted classes alone, cut to eps.

    Settings beside eps, norm (l2 or linf) and seed:
    `steps`: rounds.
    `first_queries`: for the first estimate of a normal; they grow with the root of the round.
    `most_queries`: of any round.
    `group`: samples given to the model at once.
    """

    norms = ("linf", "l2")
    finds_nearest = True

    norm: Norm = L2
    steps: int = 64
    first_queries: int = 100
    most_queries: int = 10_000
    group: int = 128

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)

        def fools(points: Tensor) -> Tensor:
            return model(points).argmax(1) != y.repeat_interleave(len(points) // len(y))

        point, found = self._first(fools, x, dice)
        point = self._to_boundary(fools, x, point)
        nearest = point
        for step in range(1, self.steps + 1):
            point = self._round(fools, x, point, dice, step)
            nearer = self.norm.length(point - x) < self.norm.length(nearest - x)
            nearest = torch.where(per_image(nearer, x), point, nearest)
            tell_step(model, step, self.steps)
        nearest = torch.where(per_image(found, x), nearest, x)
        return (x + self.norm.project(nearest - x, self.eps)).clamp(0, 1)

    def cost(self) -> Cost:
        """The longest round asks for the most samples."""
        return Cost(self.steps, min(self.first_queries * math.sqrt(self.steps), self.most_queries) + 2 * HALVINGS)

    def _first(self, fools: Fools, x: Tensor, dice: Dice) -> tuple[Tensor, Tensor]:
        """The image itself where it is misclassified, else the first random image that is; and whether there is one."""
        point = x
        found = fools(x)
        for number in range(TRIES):
            guess = _noise(x, dice, number)
            new = fools(guess) & ~found
            point = torch.where(per_image(new, x), guess, point)
            found = found | new
        return point, found

    def _round(self, fools: Fools, x: Tensor, point: Tensor, dice: Dice, step: int) -> Tensor:
        """Estimate the normal, step along it as far as the point still fools the model, return to the boundary."""
        distance = self.norm.length(point - x)  # (B,)
        pixels = x[0].numel()
        width = distance / (pixels if self.norm == L2 else pixels**0.5) if step > 1 else torch.full_like(distance, 0.1)
        normal = self._normal(fools, point, width.clamp(min=1e-6), dice, step)
        stride = distance / math.sqrt(step)
        moved = point
        stuck = torch.ones_like(distance, dtype=torch.bool)
        for _ in range(HALVINGS):
            guess = (point + per_image(stride, x) * normal).clamp(0, 1)
            good = stuck & fools(guess)
            moved = torch.where(per_image(good, x), guess, moved)
            stuck = stuck & ~good
            stride = stride / 2
        return self._to_boundary(fools, x, moved)

    def _normal(self, fools: Fools, point: Tensor, width: Tensor, dice: Dice, step: int) -> Tensor:
        """Mean of random directions, weighted by the answers there less their mean (equation 15)."""
        queries = min(int(self.first_queries * math.sqrt(step)), self.most_queries)
        votes = point.new_zeros(len(point))
        directions = torch.zeros_like(point)
        total = torch.zeros_like(point)
        for first in range(0, queries, self.group):
            count = min(self.group, queries - first)
            ways = self._ways(point, dice, count, f"ways {first}", step)  # (B, S, ...)
            tries = (point[:, None] + per_image(width, ways) * ways).clamp(0, 1)
            ways = (tries - point[:, None]) / per_image(width, ways)
            answers = 2 * fools(tries.flatten(0, 1)).to(point.dtype).view(-1, count) - 1  # (B, S)
            votes = votes + answers.sum(1)
            directions = directions + ways.sum(1)
            total = total + torch.einsum("bs,bs...->b...", answers, ways)
        mean = votes / queries
        one_sided = mean.abs() == 1
        guess = total - per_image(torch.where(one_sided, torch.zeros_like(mean), mean), point) * directions
        return self.norm.steepest(guess)

    def _ways(self, point: Tensor, dice: Dice, count: int, stream: str, step: int) -> Tensor:
        shape = (count, *point.shape[1:])
        drawn = dice.normal(stream, shape, step) if self.norm == L2 else 2 * dice.uniform(stream, shape, step) - 1
        ways = drawn.to(point.dtype).flatten(0, 1)
        return (ways / per_image(L2.length(ways).clamp(min=1e-12), ways)).view(len(point), *shape)

    def _to_boundary(self, fools: Fools, x: Tensor, point: Tensor) -> Tensor:
        """The last point that fools the model on the way to the image, by bisection."""
        delta = point - x
        outside = self.norm.length(delta)
        if self.norm == L2:  # the share of the line, not its length
            outside = torch.ones_like(outside)
        inside = torch.zeros_like(outside)
        for _ in range(min(math.ceil(1.5 * math.log2(x[0].numel())) + 2, 25)):
            middle = (inside + outside) / 2
            good = fools(self._between(x, delta, middle))
            outside = torch.where(good, middle, outside)
            inside = torch.where(good, inside, middle)
        return self._between(x, delta, outside)

    def _between(self, x: Tensor, delta: Tensor, amount: Tensor) -> Tensor:
        """Along the line in L2, by clipping in Linf."""
        limit = per_image(amount, x)
        if self.norm == L2:
            return x + limit * delta
        return x + torch.minimum(torch.maximum(delta, -limit), limit)


def _noise(x: Tensor, dice: Dice, number: int) -> Tensor:
    """Random images, of coarser and coarser grain: many models call all fine noise by one name."""
    noise = dice.uniform("first", x.shape[1:], number).to(x.dtype)
    grain = 2 ** (number % 5)
    if x.ndim != 4 or grain == 1:
        return noise
    coarse = noise[:, :, ::grain, ::grain].repeat_interleave(grain, 2).repeat_interleave(grain, 3)
    return coarse[:, :, : x.shape[2], : x.shape[3]]
