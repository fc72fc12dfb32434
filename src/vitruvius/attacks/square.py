"""Square: random search over squares, without gradients (Andriushchenko et al. 2020, arXiv:1912.00049)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import project_l1_box, safe_radius
from vitruvius.attacks._batching import SMALL_BATCH, search_in_batches
from vitruvius.attacks._models import full_precision, progress_of
from vitruvius.attacks.base import Attack, Cost, Model, attacks
from vitruvius.attacks.losses import MARGIN, hard_labels
from vitruvius.attacks.norms import Norm, per_image

BLOCK = 20  # queries, at least, between two checks of who is done
TRIES = 4  # queries of an image in one pass, at most
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after this many of 10,000 queries the area is halved
TINY = 1e-12

Draws = Sequence[Tensor]  # what `propose` needs for N points, a row for each


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
            draws = proposals.draw(s.x, Dice(s.ids, dice.seed, dice.owner), begun - 1, BLOCK)
            image = torch.arange(len(s.x), device=x.device).repeat(tries)
            for _ in range(BLOCK // tries):
                rows = upcoming(s.query - begun, tries) * len(s.x) + image
                drawn = [each[rows] for each in draws]
                points = proposals.propose(repeated(s.x, tries), repeated(s.best, tries), drawn)
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


class SquareProposals(NamedTuple):
    """Squares in the Linf ball; `sides` (queries + 1,) is the side of each query's square."""

    eps: float
    sides: Tensor

    def start(self, x: Tensor, dice: Dice) -> Tensor:
        """Columns of +eps and −eps, colour by colour."""
        return paint(x, self.eps, dice.signs("stripes", (x.shape[1], 1, x.shape[3])))

    def draw(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> Draws:
        """T * B squares, turn by turn: rows (N, 1, H, 1) and columns (N, 1, 1, W) bool, and signs (N, C, 1, 1)."""
        _, channels, height, width = x.shape
        numbers = upcoming(number, turns)
        side = self.sides[numbers.clamp(max=len(self.sides) - 1)][:, None]  # (T * B, 1)
        drawn = Dice(dice.ids.repeat(turns), dice.seed, dice.owner).integers("square", 2**30, (2 + channels,), numbers)
        row = drawn[:, :1] % (height - side + 1)
        column = drawn[:, 1:2] % (width - side + 1)
        return (*spans(x, row, column, side), signs_of(x, drawn[:, 2:]))

    def propose(self, x: Tensor, best: Tensor, draws: Draws) -> Tensor:
        """The best images so far, with one more square each."""
        tall, wide, signs = draws
        return torch.where(tall & wide, paint(x, self.eps, signs), best)


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
    shares = (share(query, first, budget) for query in range(queries + 1))
    sides = [round(math.sqrt(part * size[0] * size[1])) for part in shares]
    return torch.tensor([min(max(side, 1), *size) for side in sides], device=device)


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

    def draw(self, x: Tensor, dice: Dice, number: Tensor, turns: int) -> Draws:
        """T * B bumps, turn by turn: rows (N, 2, H, 1) and columns (N, 2, 1, W) bool of the bump and of the window that
        pays for it, `down` (N, H, 1) and `across` (N, 1, W), whose sum is a pixel's place in the table, and signs.
        """
        channels, height, width = x.shape[1:]
        numbers = upcoming(number, turns)
        side = self.sides[numbers.clamp(max=len(self.sides) - 1)][:, None]  # (T * B, 1)
        drawn = Dice(dice.ids.repeat(turns), dice.seed, dice.owner).integers("bump", 2**30, (5 + channels,), numbers)
        row = drawn[:, :2] % (height - side + 1)
        column = drawn[:, 2:4] % (width - side + 1)
        places = self._places(x, row[:, :1], column[:, :1], side, drawn[:, 4:5] % 2 == 1)
        return (*spans(x, row, column, side), *places, signs_of(x, drawn[:, 5:]))

    def propose(self, x: Tensor, best: Tensor, draws: Draws) -> Tensor:
        """A new bump in one window, paid for by emptying another and by what the ball still has room for."""
        tall, wide, down, across, signs = draws
        here, there = (tall & wide).split(1, dim=1)
        shape = self.table.flatten()[down + across][:, None].to(x.dtype)
        delta = best - x
        own = delta * here
        bumps = signs * shape * here + own / (self._mass(own) + TINY)
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
