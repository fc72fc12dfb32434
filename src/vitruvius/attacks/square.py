"""Square: random search over squares, without gradients (Andriushchenko et al. 2020, arXiv:1912.00049)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius._errors import ConfigError
from vitruvius.attacks._base import Attack, Model, Work, attacks, check_at_least
from vitruvius.attacks._losses import MARGIN, hard_labels
from vitruvius.attacks._models import full_precision
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.batching import search_in_batches
from vitruvius.attacks._search.square_proposals import SquareProposals, square_sides
from vitruvius.attacks._search.square_proposals_l2 import BumpProposals, bump_proposals
from vitruvius.attacks._search.watch import current_watch

BLOCK = 20  # queries between two checks of who is done


class SquareState(NamedTuple):
    """How far the random searches of B images have come."""

    x: Tensor
    y: Tensor  # (B,)
    ids: Tensor  # (B,)
    point: Tensor  # tried next
    best: Tensor
    margin: Tensor  # (B,) of the best: positive where it fools the model
    query: Tensor  # (B,) tries made
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

    batches_itself: ClassVar[bool] = True

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
        found = x.clone()
        proposals = self.proposals(x)
        watch = current_watch()
        watch.begin(0, 1, len(x))

        def begin(rows: Tensor) -> SquareState:
            return SquareState(
                x=x[rows],
                y=y[rows],
                ids=dice.ids[rows],
                point=proposals.start(x[rows], dice[rows]),
                best=x[rows],
                margin=x.new_full((len(rows),), -torch.inf),
                query=torch.zeros_like(rows),
                done=torch.zeros_like(rows, dtype=torch.bool),
            )

        def advance(s: SquareState) -> SquareState:
            propose = proposals.plan(s.x, Dice(s.ids, dice.seed, dice.owner), s.query, BLOCK)
            for turn in range(BLOCK):
                s = self.judge(model, s)
                s = s._replace(point=propose(s.best, turn))
            return s

        def finish(rows: Tensor, end: SquareState) -> None:
            found[rows] = end.best
            watch.searched(len(rows), int((end.margin > 0).sum()))
            watch.settled(rows, end.best)

        steps = math.ceil(self.queries / BLOCK)
        every = torch.arange(len(x), device=x.device)
        search_in_batches(every, begin, advance, finish, self.batch_size, steps=steps)
        return found

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the queries, and other squares."""
        return replace(self, queries=max(self.queries // 10, 50)).search(model, x, y, replace(dice, owner="polish"))

    def work(self) -> Work:
        return Work(1, math.ceil(self.queries / BLOCK), BLOCK)

    def judge(self, model: Model, s: SquareState) -> SquareState:
        """Ask the model, and keep what is better; who is done stays as it is.

        `model` answers with logits; `s` is the state of the search with the points proposed.
        """
        margin = MARGIN(full_precision(model(s.point)), s.y)
        better = (margin > s.margin) & ~s.done
        best = torch.where(per_image(better, s.x), s.point, s.best)
        margin = torch.where(better, margin, s.margin)
        query = s.query + ~s.done
        return s._replace(best=best, margin=margin, query=query, done=(margin > 0) | (query >= self.queries))

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
