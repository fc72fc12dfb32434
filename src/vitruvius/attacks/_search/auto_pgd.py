"""What the Auto-PGD attacks share: runs of ascents over images that still stand, in batches that stay full."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice
from vitruvius._errors import ConfigError
from vitruvius.attacks._base import Attack, Model
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._models import full_precision, verifier_of
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.auto_pgd_step import Ascent
from vitruvius.attacks._search.auto_pgd_step_l1 import SparseAscent
from vitruvius.attacks._search.batching import search_in_batches
from vitruvius.attacks._search.best_so_far import BestSoFar, take_chunk
from vitruvius.attacks._views.compiled import compile_model


class Run(NamedTuple):
    """One attempt on every image that still stands."""

    number: int
    target: Tensor  # (B,) for all images; the labels where the loss has no target


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Attack):
    """Auto-PGD with a loss and a list of runs still to be named."""

    steps: int = 100
    restarts: int = 1
    eot_iterations: int = 1  # passes averaged for each gradient, for models that are random
    batch_size: int | None = None  # images searched at once; default all
    compile: bool = False  # the model, and the bookkeeping of linf and l2, by torch.compile

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"steps": self.steps, "restarts": self.restarts, "eot_iterations": self.eot_iterations}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"{type(self).__name__} with {name}={value}; expected 1 or more.")

    def prepare(self, model: nn.Module, x: Tensor) -> nn.Module:
        return compile_model(model, x) if self.compile else model

    @abstractmethod
    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """What is climbed, (B,)."""

    @abstractmethod
    def runs(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Run]:
        """The attempts, in order."""

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        """Run after run; the first from `start` where one is given, the others from random points."""
        best, y = BestSoFar(x), hard_labels(y)
        runs, room = list(self.runs(model, x, y)), self.batch_size or len(x)
        while runs and len(rows := best.not_fooled()):
            now, runs = take_chunk(runs, room, len(rows))
            target, many = torch.cat([run.target[rows] for run in now]), rows.repeat(len(now))
            number = rows.new_tensor([run.number for run in now]).repeat_interleave(len(rows))
            begin = None if start is None else start[many]
            found = self._attempt(model, x[many], y[many], target, dice[many], number, begin)
            best.offer_in_turn(rows, found.point, found.fooled, found.loss)
        return best.x

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once a target, all from the best point known."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice, start)

    def _attempt(
        self, model: Model, x: Tensor, y: Tensor, target: Tensor, dice: Dice, number: Tensor, start: Tensor | None
    ) -> Found:
        """AscentState leg by leg, each from where the last one ended; with a start, the last leg alone."""
        if self.norm.name != "l1":
            rules = (self.norm, self.eps, self.steps, self.objective, self.eot_iterations)
            leg = Ascent(*rules, fused=self.compile)
            return run_ascents(model, leg, x, y, target, _starts(leg, x, dice, number, start), self.batch_size)
        for sparse in self._sparse_legs(warm=start is not None):
            found = run_ascents(model, sparse, x, y, target, _starts(sparse, x, dice, number, start), self.batch_size)
            start = found.best
        return found

    def _sparse_legs(self, warm: bool) -> Iterator[SparseAscent]:
        """In L1, three ascents through balls of 3, 2 and 1 times the radius; only the last may stop early."""
        third = 0 if warm else int(0.3 * self.steps)
        rules = SparseAscent(self.eps, third, self.objective, self.eot_iterations, stops=False, fresh=False)
        if not warm:
            yield rules._replace(eps=3 * self.eps, fresh=True)
            yield rules._replace(eps=2 * self.eps)
        yield rules._replace(steps=self.steps - 2 * third, stops=True)


def _starts(
    leg: Ascent | SparseAscent, x: Tensor, dice: Dice, number: Tensor, before: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Where the images of some rows begin: at random, or at the nearest point of the ball to where they were before."""
    if before is None:
        return lambda rows: leg.start(x[rows], dice[rows], number[rows])
    return lambda rows: leg.restart(x[rows], before[rows])


class AscentProgress(Protocol):
    """What the states of all ascents tell."""

    @property
    def y(self) -> Tensor: ...
    @property
    def seen(self) -> Tensor: ...
    @property
    def best(self) -> Tensor: ...
    @property
    def best_loss(self) -> Tensor: ...
    @property
    def iteration(self) -> Tensor: ...
    @property
    def fooled(self) -> Tensor: ...
    @property
    def done(self) -> Tensor: ...


C = TypeVar("C", bound=AscentProgress)


class AscentRules(Protocol[C]):
    """Rules of an ascent."""

    @property
    def steps(self) -> int: ...
    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> C: ...
    def advance(self, model: Callable[[Tensor], Tensor], s: C) -> C: ...


class Found(NamedTuple):
    """Where N ascents ended."""

    point: Tensor  # that fools the model, else of highest loss
    best: Tensor  # of highest loss
    loss: Tensor  # (N,) the highest
    fooled: Tensor  # (N,) bool


def run_ascents(
    model: Callable[[Tensor], Tensor],
    leg: AscentRules[C],
    x: Tensor,
    y: Tensor,
    target: Tensor,
    start: Callable[[Tensor], Tensor],
    batch_size: int | None,
) -> Found:
    """AscentState from `start(rows)` for all images, at most `batch_size` at once."""
    found = Found(x.clone(), x.clone(), x.new_zeros(len(x)), y.new_zeros(len(x), dtype=torch.bool))

    def begin(rows: Tensor) -> C:
        return leg.begin(x[rows], y[rows], target[rows], start(rows))

    def finish(rows: Tensor, end: C) -> None:
        found.point[rows] = torch.where(per_image(end.fooled, x), end.seen, end.best)
        fooled = end.fooled if judge is None else end.fooled & (end.iteration <= leg.steps)  # the last is not confirmed
        found.best[rows], found.loss[rows], found.fooled[rows] = end.best, end.best_loss, fooled

    rows, judge = torch.arange(len(x), device=x.device), verifier_of(model)
    confirm = None if judge is None else lambda state: confirmed(judge, state, leg.steps)
    search_in_batches(rows, begin, lambda state: leg.advance(model, state), finish, batch_size, confirm)
    return found


def confirmed(judge: Callable[[Tensor], Tensor], state: AscentProgress, steps: int) -> Tensor:
    """(B,) bool, on the CPU: who is done, but for those with steps left that have not fooled the judge."""
    over = state.done.cpu()
    claims = (state.done & state.fooled & (state.iteration <= steps)).nonzero().squeeze(1)
    if len(claims):
        fooled = full_precision(judge(state.seen[claims])).argmax(1) != state.y[claims]
        over[claims.cpu()] = fooled.cpu()
    return over
