"""What Square tries next in the Linf ball: vertical stripes first, then squares of one colour at random places.

Andriushchenko et al. 2020, arXiv:1912.00049, algorithms 1 and 2. Every image draws its own squares.
B images of C channels, H × W pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._dice import Dice

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after this many of 10,000 queries the area is halved


Propose = Callable[[Tensor, Tensor, Tensor], Tensor]  # images (N, …), the best so far, rows (N,) of the plan → points


class SquareDraws(NamedTuple):
    """Where N squares lie, and their colours."""

    tall: Tensor  # (N, 1, H, 1) bool
    wide: Tensor  # (N, 1, 1, W) bool
    signs: Tensor  # (N, C, 1, 1)


class SquareProposals(NamedTuple):
    """SquareProposals in the Linf ball; `sides` (queries + 1,) is the side of each query's square."""

    eps: float
    sides: Tensor

    def start(self, x: Tensor, dice: Dice) -> Tensor:
        """Columns of +eps and −eps, colour by colour."""
        return paint(x, self.eps, dice.signs("stripes", (x.shape[1], 1, x.shape[3])))

    def plan(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> Propose:
        """What is drawn for some turns from these numbers (B,) on, ready to be proposed."""
        draws = self.draw(x, dice, number, turns)
        return lambda x, best, rows: self.propose(x, best, SquareDraws(*(drawn[rows] for drawn in draws)))

    def draw(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> SquareDraws:
        """T * B squares, turn by turn."""
        _, channels, height, width = x.shape
        numbers = upcoming(number, turns)
        side = self.sides[numbers.clamp(max=len(self.sides) - 1)][:, None]  # (T * B, 1)
        drawn = Dice(dice.ids.repeat(turns), dice.seed, dice.owner).integers("square", 2**30, (2 + channels,), numbers)
        row = drawn[:, :1] % (height - side + 1)
        column = drawn[:, 1:2] % (width - side + 1)
        return SquareDraws(*spans(x, row, column, side), signs_of(x, drawn[:, 2:]))

    def propose(self, x: Tensor, best: Tensor, draws: SquareDraws) -> Tensor:
        """The best images so far, with one more square each."""
        return torch.where(draws.tall & draws.wide, paint(x, self.eps, draws.signs), best)


def paint(x: Tensor, eps: float, signs: Tensor) -> Tensor:
    """The image moved by ±eps wherever the image has room."""
    return (x + eps * signs.to(x.dtype)).clamp(0, 1)


def signs_of(x: Tensor, drawn: Tensor) -> Tensor:
    """(N, C, 1, 1) of −1 and 1, as numbers (N, C) are odd or even."""
    return (1.0 - 2 * (drawn % 2)).to(x.dtype)[:, :, None, None]


def spans(x: Tensor, row: Tensor, column: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """(N, S, H, 1) and (N, S, 1, W) bool: rows and columns of squares with corners (N, S) and sides (N, 1)."""
    rows = torch.arange(x.shape[2], device=x.device) - row[:, :, None]  # (N, S, H)
    columns = torch.arange(x.shape[3], device=x.device) - column[:, :, None]  # (N, S, W)
    tall = (rows >= 0) & (rows < side[:, :, None])
    wide = (columns >= 0) & (columns < side[:, :, None])
    return tall[:, :, :, None], wide[:, :, None, :]


def upcoming(number: Tensor, turns: int) -> Tensor:
    """(T * B,) the numbers from (B,) on, turn by turn."""
    return (number + torch.arange(turns, device=number.device)[:, None]).flatten()


def share(query: int, first: float, budget: int | None = None) -> float:
    """Share of the image a square covers; with a budget, the schedule is stretched over it."""
    if budget:
        query = int(query / budget * 10_000)
    return first * 0.5 ** sum(query > halving for halving in HALVINGS)


@functools.lru_cache(maxsize=64)
def square_sides(queries: int, first: float, size: tuple[int, int], rescale: bool, device: torch.device) -> Tensor:
    """(queries + 1,) sides of the squares of each query, in pixels."""
    budget = None
    if rescale:
        budget = queries
    area = size[0] * size[1]
    sides = []
    for query in range(queries + 1):
        side = round(math.sqrt(share(query, first, budget) * area))
        sides.append(min(max(side, 1), *size))
    return torch.tensor(sides, device=device)
