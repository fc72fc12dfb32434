"""What the Auto-PGD attacks share: runs of ascents over images that still stand, in batches that stay full."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice
from vitruvius._errors import ConfigError
from vitruvius.attacks._ascent import Ascent
from vitruvius.attacks._base import Attack, Model
from vitruvius.attacks._l1_ascent import SparseAscent
from vitruvius.attacks._legs import Found, climb
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._views import compiled
from vitruvius.attacks._worst import Worst, together


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
        return compiled(model, x) if self.compile else model

    @abstractmethod
    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """What is climbed, (B,)."""

    @abstractmethod
    def runs(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Run]:
        """The attempts, in order."""

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        """Run after run; the first from `start` where one is given, the others from random points."""
        worst, y = Worst(x), hard_labels(y)
        runs, room = list(self.runs(model, x, y)), self.batch_size or len(x)
        while runs and len(rows := worst.standing()):
            now, runs = together(runs, room, len(rows))
            target, many = torch.cat([run.target[rows] for run in now]), rows.repeat(len(now))
            number = rows.new_tensor([run.number for run in now]).repeat_interleave(len(rows))
            begin = None if start is None else start[many]
            found = self._attempt(model, x[many], y[many], target, dice[many], number, begin)
            worst.offer_in_turn(rows, found.point, found.fooled, found.loss)
        return worst.x

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once a target, all from the worst point known."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice, start)

    def _attempt(
        self, model: Model, x: Tensor, y: Tensor, target: Tensor, dice: Dice, number: Tensor, start: Tensor | None
    ) -> Found:
        """Climb leg by leg, each from where the last one ended; with a start, the last leg alone."""
        if self.norm.name != "l1":
            rules = (self.norm, self.eps, self.steps, self.objective, self.eot_iterations)
            leg = Ascent(*rules, fused=self.compile)
            return climb(model, leg, x, y, target, _starts(leg, x, dice, number, start), self.batch_size)
        for sparse in self._sparse_legs(warm=start is not None):
            found = climb(model, sparse, x, y, target, _starts(sparse, x, dice, number, start), self.batch_size)
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
