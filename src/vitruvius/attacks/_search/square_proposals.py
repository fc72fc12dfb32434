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


class SquareProposals(NamedTuple):
    """SquareProposals in the Linf ball; `sides` (queries + 1,) is the side of each query's square."""

    eps: float
    sides: Tensor

    def start(self, x: Tensor, dice: Dice) -> Tensor:
        """Columns of +eps and −eps, colour by colour."""
        return paint(x, self.eps, dice.signs("stripes", (x.shape[1], 1, x.shape[3])))

    def plan(self, x: Tensor, dice: Dice, query: Tensor, turns: int) -> Callable[[Tensor, int], Tensor]:
        """(best image so far, turn) → the same with one more square, for some turns from these queries (B,) on."""
        batch, channels, height, width = x.shape
        queries = upcoming(query, turns)
        side = self.sides[queries.clamp(max=len(self.sides) - 1)]  # (T * B,)
        drawn = Dice(dice.ids.repeat(turns), dice.seed, dice.owner).integers("square", 2**30, (2 + channels,), queries)
        row = drawn[:, 0] % (height - side + 1)
        column = drawn[:, 1] % (width - side + 1)
        signs = (1.0 - 2 * (drawn[:, 2:] % 2)).view(turns, batch, channels, 1, 1)
        tall, wide = (part.unflatten(0, (turns, batch)) for part in spans(x, row, column, side))

        def propose(best: Tensor, turn: int) -> Tensor:
            return torch.where(tall[turn] & wide[turn], paint(x, self.eps, signs[turn]), best)

        return propose

    def place(self, x: Tensor, best: Tensor, row: Tensor, column: Tensor, side: Tensor, signs: Tensor) -> Tensor:
        """SquareProposals with corners and sides (B,) and colours (B, C, 1, 1), painted over the best images."""
        return torch.where(window(x, row, column, side), paint(x, self.eps, signs), best)


def paint(x: Tensor, eps: float, signs: Tensor) -> Tensor:
    """The image moved by ±eps wherever the image has room."""
    return (x + eps * signs.to(x.dtype)).clamp(0, 1)


def window(x: Tensor, row: Tensor, column: Tensor, side: Tensor) -> Tensor:
    """(B, 1, H, W) bool: True inside the squares with these corners (B,) and sides (B,)."""
    tall, wide = spans(x, row, column, side)
    return tall & wide


def spans(x: Tensor, row: Tensor, column: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1, H, 1) and (B, 1, 1, W) bool: rows and columns of the squares with these corners (B,) and sides (B,)."""
    rows = torch.arange(x.shape[2], device=x.device)[None] - row[:, None]  # (B, H)
    columns = torch.arange(x.shape[3], device=x.device)[None] - column[:, None]  # (B, W)
    tall = (rows >= 0) & (rows < side[:, None])
    wide = (columns >= 0) & (columns < side[:, None])
    return tall[:, None, :, None], wide[:, None, None, :]


def upcoming(query: Tensor, turns: int) -> Tensor:
    """(T * B,) the queries from (B,) on, turn by turn."""
    return (query + torch.arange(turns, device=query.device)[:, None]).flatten()


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
