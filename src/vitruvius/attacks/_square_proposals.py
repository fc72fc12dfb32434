"""What Square tries next: squares of one colour in the Linf ball; in L2 and L1 bumps that take their mass elsewhere.

Andriushchenko et al. 2020, arXiv:1912.00049, algorithms 1 and 2 (Linf), section 3.3 and algorithm 3 (L2); L1 as in
Croce & Hein 2021, arXiv:2103.01208, appendix. Every image draws its own. B images of C channels, H × W pixels; T turns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import project_l1_box, safe_radius
from vitruvius.attacks.norms import Norm, per_image

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after this many of 10,000 queries the area is halved
TINY = 1e-12

Propose = Callable[[Tensor, Tensor, Tensor], Tensor]  # images (N, …), the best so far, rows (N,) of the plan → points


class SquareDraws(NamedTuple):
    """Where N squares lie, and their colours."""

    tall: Tensor  # (N, 1, H, 1) bool
    wide: Tensor  # (N, 1, 1, W) bool
    signs: Tensor  # (N, C, 1, 1)


class SquareProposals(NamedTuple):
    """Squares in the Linf ball; `sides` (queries + 1,) is the side of each query's square."""

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
    budget = queries if rescale else None
    area = size[0] * size[1]
    sides = []
    for query in range(queries + 1):
        side = round(math.sqrt(share(query, first, budget) * area))
        sides.append(min(max(side, 1), *size))
    return torch.tensor(sides, device=device)


class BumpDraws(NamedTuple):
    """Where N bumps and the windows that pay for them lie, their shapes and their signs."""

    tall: Tensor  # (N, 2, H, 1) bool: rows of the bump, and of the other window
    wide: Tensor  # (N, 2, 1, W) bool
    down: Tensor  # (N, H, 1) and
    across: Tensor  # (N, 1, W): their sum is a pixel's place in the table; only meant within the bump's window
    signs: Tensor  # (N, C, 1, 1)


class BumpProposals(NamedTuple):
    """Bumps in an L2 or L1 ball; `sides` (queries + 1,) is the odd side of each query's window."""

    norm: Norm
    eps: float
    sides: Tensor
    table: Tensor  # (S, largest, largest) a bump of each of S sides, padded with 0
    number_of: Tensor  # (largest + 1,) which of them belongs to a side

    def start(self, x: Tensor, dice: Dice) -> Tensor:
        """The image tiled with bumps of a fifth of its height, of random signs."""
        channels, height, width = x.shape[1:]
        side = max(height // 5, 1)
        down = math.ceil(height / side)
        across = math.ceil(width / side)
        signs = dice.signs("tiles", (channels, down, across)).repeat_interleave(side, 2).repeat_interleave(side, 3)
        tiles = bump(side, self.norm, x.device).repeat(down, across)
        return self._fill(x, (signs * tiles)[:, :, :height, :width].to(x.dtype))

    def plan(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> Propose:
        """What is drawn for some turns from these numbers (B,) on, ready to be proposed."""
        draws = self.draw(x, dice, number, turns)
        return lambda x, best, rows: self.propose(x, best, BumpDraws(*(drawn[rows] for drawn in draws)))

    def draw(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> BumpDraws:
        """T * B bumps, turn by turn."""
        channels, height, width = x.shape[1:]
        numbers = upcoming(number, turns)
        side = self.sides[numbers.clamp(max=len(self.sides) - 1)][:, None]  # (T * B, 1)
        drawn = Dice(dice.ids.repeat(turns), dice.seed, dice.owner).integers("bump", 2**30, (5 + channels,), numbers)
        row = drawn[:, :2] % (height - side + 1)
        column = drawn[:, 2:4] % (width - side + 1)
        places = self._places(x, row[:, :1], column[:, :1], side, drawn[:, 4:5] % 2 == 1)
        return BumpDraws(*spans(x, row, column, side), *places, signs_of(x, drawn[:, 5:]))

    def propose(self, x: Tensor, best: Tensor, draws: BumpDraws) -> Tensor:
        """A new bump in one window, paid for by emptying another and by what the ball still has room for."""
        here, there = (draws.tall & draws.wide).split(1, dim=1)
        shape = self.table.flatten()[draws.down + draws.across][:, None].to(x.dtype)
        delta = best - x
        own = delta * here
        bumps = draws.signs * shape * here + own / (self._mass(own) + TINY)
        bumps = bumps / (self._mass(bumps) + TINY) * self._budget(delta, here | there)
        return self._fill(x, torch.where(here, bumps, torch.where(there, 0.0, delta)))

    def _places(self, x: Tensor, row: Tensor, column: Tensor, side: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """What rows (N, H, 1) and columns (N, 1, W) add to a pixel's place in the table; turned ones are transposed."""
        largest = self.table.shape[1]
        i = (torch.arange(x.shape[2], device=x.device) - row).clamp(0, largest - 1)  # (N, H)
        j = (torch.arange(x.shape[3], device=x.device) - column).clamp(0, largest - 1)  # (N, W)
        down = self.number_of[side] * largest**2 + i * torch.where(turned, 1, largest)
        across = j * torch.where(turned, largest, 1)
        return down[:, :, None], across[:, None, :]

    def _mass(self, delta: Tensor) -> Tensor:
        """(B, C, 1, 1) norms, channel by channel."""
        return torch.linalg.vector_norm(delta, self._order, dim=(2, 3), keepdim=True)

    def _budget(self, delta: Tensor, windows: Tensor) -> Tensor:
        """(B, C, 1, 1) norm each channel's bump may have: that of both windows and a share of the unused rest."""
        order = self._order
        unused = (self.eps**order - self.norm.length(delta) ** order).clamp(min=0) / delta.shape[1]
        budget = (per_image(unused, delta) + self._mass(delta * windows) ** order) ** (1 / order)
        if self.norm.name == "l1":  # too much, which the projection takes back
            return budget * delta.shape[1]
        return budget

    @property
    def _order(self) -> float:
        return {"l2": 2.0, "l1": 1.0}[self.norm.name]

    def _fill(self, x: Tensor, delta: Tensor) -> Tensor:
        """Stretch a change to the whole radius, and stay in the image."""
        if self.norm.name == "l1":
            return x + project_l1_box(x, delta, safe_radius(x, self.eps))
        return (x + delta * per_image(self.eps / (self.norm.length(delta) + TINY), x)).clamp(0, 1)


def bump_proposals(norm: Norm, eps: float, sides: Tensor) -> BumpProposals:
    """Bumps, with the shapes of all their sides prepared."""
    known = sides.unique().tolist()
    table = torch.zeros(len(known), max(known), max(known), device=sides.device)
    number_of = torch.zeros(max(known) + 1, dtype=torch.long, device=sides.device)
    for number, side in enumerate(known):
        table[number, :side, :side] = bump(side, norm, sides.device)
        number_of[side] = number
    return BumpProposals(norm, eps, sides, table, number_of)


def bump(side: int, norm: Norm, device: torch.device) -> Tensor:
    """(side, side) of unit norm: a positive hill above a negative one."""
    upper = side // 2
    hills = torch.cat([_hill(upper, side, norm, device), -_hill(side - upper, side, norm, device)])
    return hills / norm.length(hills[None])


def _hill(height: int, width: int, norm: Norm, device: torch.device) -> Tensor:
    """(height, width) nested rectangles growing from the middle, of falling weight; unit norm."""
    hill = torch.zeros(height, width, device=device)
    power = {"l2": 2, "l1": 4}[norm.name]
    for ring in range(max(height, width) // 2 + 1):
        top = height // 2 - ring
        left = width // 2 - ring
        hill[max(top, 0) : top + 2 * ring + 1, max(left, 0) : left + 2 * ring + 1] += (ring + 1.0) ** -power
    return hill / norm.length(hill[None]).clamp(min=TINY)
