"""Square: random search over squares, without gradients (Andriushchenko et al. 2020, arXiv:1912.00049)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._random import Dice
from vitruvius.attacks._batching import SMALL_BATCH, search_in_batches
from vitruvius.attacks._models import full_precision, progress_of
from vitruvius.attacks._square_proposals import (
    BumpProposals,
    SquareProposals,
    bump_proposals,
    square_sides,
    upcoming,
)
from vitruvius.attacks.base import Attack, Cost, Model, attacks, check_at_least
from vitruvius.attacks.losses import MARGIN, hard_labels
from vitruvius.attacks.norms import per_image

BLOCK = 20  # queries, at least, between two checks of who is done
TRIES = 4  # queries of an image in one pass, at most


class SquareState(NamedTuple):
    """How far the random searches of B images have come."""

    x: Tensor
    y: Tensor  # (B,)
    ids: Tensor  # (B,)
    best: Tensor
    margin: Tensor  # (B,) of the best: positive where it fools the model
    query: Tensor  # (B,) queries made
    done: Tensor  # (B,) bool


@attacks.register("square")
@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Random search over coloured squares that keeps whatever lowers the margin; needs no gradients.

    Settings beside eps, norm and seed:
    `queries`: of the model for each image.
    `first_share`: of the image covered by the first squares; they shrink on the released schedule.
    `rescale`: stretch the schedule of shares over the number of queries.
    `batch_size`: images searched at once; default all.
    """

    queries: int = 5000
    first_share: float = 0.8
    rescale: bool = False
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "queries")
        if not 0 < self.first_share <= 1:
            raise ConfigError(f"Square with first_share={self.first_share}; expected more than 0 and at most 1.")

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        y = hard_labels(y)
        best = x.clone()
        proposals = self.proposals(x)

        def begin(rows: Tensor) -> SquareState:
            start = proposals.start(x[rows], dice[rows])
            return self.judge(model, unsearched(x[rows], y[rows], dice.ids[rows]), start[None])

        def advance(s: SquareState) -> SquareState:
            goal = s.query + BLOCK
            s = block(s)
            while not bool((s.done | (s.query >= goal)).all()):  # some were asked in vain, after an accepted one
                s = block(s)
            return s

        def block(s: SquareState) -> SquareState:
            tries = self.tries(s.x)
            begun = s.query
            propose = proposals.plan(s.x, Dice(s.ids, dice.seed, dice.owner), begun - 1, BLOCK)
            image = torch.arange(len(s.x), device=x.device).repeat(tries)
            for _ in range(BLOCK // tries):
                turn = upcoming(s.query - begun, tries)
                points = propose(repeated(s.x, tries), repeated(s.best, tries), turn * len(s.x) + image)
                s = self.judge(model, s, points.unflatten(0, (tries, len(s.x))))
            return s

        def finish(rows: Tensor, end: SquareState) -> Tensor:
            best[rows] = end.best
            return end.margin > 0

        every = torch.arange(len(x), device=x.device)
        steps = self.cost().steps
        search_in_batches(every, begin, advance, finish, self.batch_size, steps=steps, progress=progress_of(model))
        return best

    def refine(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the queries, and other squares."""
        return replace(self, queries=max(self.queries // 10, 50)).search(model, x, y, replace(dice, owner="polish"))

    def cost(self) -> Cost:
        return Cost(math.ceil(self.queries / BLOCK), BLOCK)

    def judge(self, model: Model, s: SquareState, points: Tensor) -> SquareState:
        """Ask the model, and keep the first point that is better; who is done stays as it is.

        `model` answers with logits; `s` is the state of the search; `points` (T, B, C, H, W) were all proposed for its
        best images, so those after one that is better are as if never asked.
        """
        tries, batch = points.shape[:2]
        logits = full_precision(model(points.flatten(0, 1)))
        margins = MARGIN(logits, s.y.repeat(tries)).unflatten(0, (tries, batch))
        numbers = upcoming(s.query, tries).unflatten(0, (tries, batch))
        better = (margins > s.margin) & (numbers < self.queries) & ~s.done
        found = better.any(0)
        first = better.byte().argmax(0)  # 0 where none is better
        each = torch.arange(batch, device=first.device)
        best = torch.where(per_image(found, s.x), points[first, each], s.best)
        margin = torch.where(found, margins[first, each], s.margin)
        made = torch.where(found, first + 1, tries)
        query = torch.where(s.done, s.query, (s.query + made).clamp(max=self.queries))
        return s._replace(best=best, margin=margin, query=query, done=(margin > 0) | (query >= self.queries))

    def tries(self, x: Tensor) -> int:
        """How many queries of each image are made in one pass: several where the batch leaves room for them.

        Most are rejected, and then the next ones are those that would have followed. `x` are the images of a batch.
        """
        room = SMALL_BATCH // x.numel()
        if self.batch_size is not None:
            room = min(room, self.batch_size // len(x))
        return max(min(room, TRIES), 1)

    def proposals(self, x: Tensor) -> SquareProposals | BumpProposals:
        """What is tried in this ball on images of this size. `x` are the images."""
        if x.ndim != 4:
            raise ConfigError(f"Square needs images (B, C, H, W); got {tuple(x.shape)}.")
        height, width = x.shape[2:]
        sides = square_sides(self.queries, self.first_share, (height, width), self.rescale, x.device)
        if self.norm.name == "linf":
            return SquareProposals(self.eps, sides)
        odd = (sides | 1).clamp(min=min(3, height, width))
        return bump_proposals(self.norm, self.eps, torch.where(odd > min(height, width), odd - 2, odd).clamp(min=1))


def unsearched(x: Tensor, y: Tensor, ids: Tensor) -> SquareState:
    """Searches before their first query, of the images `x` (B, C, H, W) with labels `y` (B,) and numbers `ids` (B,)."""
    never = x.new_full((len(x),), -torch.inf)
    return SquareState(x, y, ids, x, never, torch.zeros_like(y), torch.zeros_like(y, dtype=torch.bool))


def repeated(x: Tensor, times: int) -> Tensor:
    """(T * B, ...): images `x` (B, ...) as often as `times` says; not copied for once."""
    return x.expand(times, *x.shape).flatten(0, 1)
