"""What the Auto-PGD attacks share: attempts on the images that are not fooled yet, in batches that stay full.

The step itself is in `auto_pgd_step` (Linf and L2) and `auto_pgd_step_l1`. B images; N images of one attempt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice
from vitruvius.attacks._base import Attack, Model, Work, check_at_least
from vitruvius.attacks._losses import hard_labels
from vitruvius.attacks._models import full_precision, verifier_of
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.auto_pgd_step import Ascent
from vitruvius.attacks._search.auto_pgd_step_l1 import SparseAscent
from vitruvius.attacks._search.batching import search_in_batches
from vitruvius.attacks._search.best_so_far import AttemptWatch, BestSoFar, take_chunk
from vitruvius.attacks._views.compiled import compile_model


class Attempt(NamedTuple):
    """One ascent for every image that is not fooled yet."""

    number: int  # among all attempts, for the dice
    target: Tensor  # (B,) for all images; the labels where the loss has no target


OnFinish = Callable[[Tensor, Tensor, Tensor], None]  # indices of ascents, their points, whether these fool the model


class Found(NamedTuple):
    """Where N ascents ended."""

    point: Tensor  # that fools the model, else of highest loss
    best: Tensor  # of highest loss
    loss: Tensor  # (N,) the highest
    fooled: Tensor  # (N,) bool


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Attack):
    """Auto-PGD with a loss and a list of attempts still to be named."""

    batches_itself: ClassVar[bool] = True

    steps: int = 100
    restarts: int = 1
    eot_iterations: int = 1  # passes averaged for each gradient, for models that are random
    batch_size: int | None = None  # images searched at once; default all
    compile: bool = False  # the model, and the bookkeeping of linf and l2, by torch.compile

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "steps", "restarts", "eot_iterations")

    def prepare(self, model: nn.Module, x: Tensor) -> nn.Module:
        if self.compile:
            return compile_model(model, x)
        return model

    @abstractmethod
    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """What is maximised, (B,).

        `logits` (B, K); `y` (B,) labels; `target` (B,) the wrong classes of this attempt, or `y` where it has none.
        """

    @abstractmethod
    def attempts(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Attempt]:
        """The attempts, in order.

        `model` returns logits; `x` (B, C, H, W) and `y` (B,) are the images and labels that are searched.
        """

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor | None = None) -> Tensor:
        """Attempt after attempt, from `start` where one is given, else from random points.

        Several attempts run side by side where so few images are left that they fit into one batch.
        """
        y = hard_labels(y)
        best = BestSoFar(x)
        attempts = list(self.attempts(model, x, y))
        watch = AttemptWatch(len(attempts))
        while attempts and len(rows := best.not_fooled()):
            chunk, attempts = take_chunk(attempts, self.batch_size or len(x), len(rows))
            chunk, attempts, rows = watch.resume(chunk, attempts, rows)
            if not len(rows):
                continue
            watch.begin(chunk, rows)
            many = rows.repeat(len(chunk))
            targets = torch.cat([attempt.target[rows] for attempt in chunk])
            numbers = rows.new_tensor([attempt.number for attempt in chunk]).repeat_interleave(len(rows))
            begin = None
            if start is not None:
                begin = start[many]
            found = self._ascend(model, x[many], y[many], targets, dice[many], numbers, begin, watch.finished)
            best.offer_in_turn(rows, found.point, found.fooled, found.loss)
            watch.end(best)
        return best.x

    def work(self) -> Work:
        """The start of every ascent is looked at too; in L1 an attempt has three."""
        starts = 1
        if self.norm.name == "l1":
            starts = 3
        work = super().work()
        return work._replace(steps=work.steps + starts)

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """A tenth of the steps, once per target, all from the worst point known."""
        return replace(self, steps=max(self.steps // 10, 5), restarts=1).search(model, x, y, dice, start)

    def _ascend(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        dice: Dice,
        number: Tensor,
        start: Tensor | None,
        on_finish: OnFinish,
    ) -> Found:
        """One ascent; in L1 several, each from where the last one ended. `on_finish` hears of the last one."""
        if self.norm.name != "l1":
            rules = Ascent(self.norm, self.eps, self.steps, self.objective, self.eot_iterations, compiled=self.compile)
            starts = _starts(rules, x, dice, number, start)
            return run_ascents(model, rules, x, y, target, starts, self.batch_size, on_finish)
        ascents = list(self._sparse_ascents(warm=start is not None))
        lengths = [sparse.steps + 1 for sparse in ascents]
        for place, sparse in enumerate(ascents):
            around = (sum(lengths[:place]), sum(lengths[place + 1 :]))
            starts = _starts(sparse, x, dice, number, start)
            last = None
            if sparse.stops:
                last = on_finish
            found = run_ascents(model, sparse, x, y, target, starts, self.batch_size, last, around)
            start = found.best
        return found

    def _sparse_ascents(self, warm: bool) -> Iterator[SparseAscent]:
        """In L1, three ascents in balls of 3, 2 and 1 times the radius, of which only the last may stop early.

        `warm`: the start is good already, so only the last one is made.
        """
        third = int(0.3 * self.steps)
        if warm:
            third = 0
        rules = SparseAscent(self.eps, third, self.objective, self.eot_iterations, stops=False, fresh=False)
        if not warm:
            yield rules._replace(eps=3 * self.eps, fresh=True)
            yield rules._replace(eps=2 * self.eps)
        yield rules._replace(steps=self.steps - 2 * third, stops=True)


def _starts(
    rules: Ascent | SparseAscent, x: Tensor, dice: Dice, number: Tensor, before: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Where the images of some rows begin: at random, or at the nearest point of the ball to where they were before."""
    if before is None:
        return lambda rows: rules.start(x[rows], dice[rows], number[rows])
    return lambda rows: rules.restart(x[rows], before[rows])


class AscentProgress(Protocol):
    """What the states of all ascents have, a row for each image."""

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
    """How an ascent begins and makes a step."""

    @property
    def steps(self) -> int: ...
    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> C: ...
    def advance(self, model: Callable[[Tensor], Tensor], s: C) -> C: ...


def run_ascents(
    model: Callable[[Tensor], Tensor],
    rules: AscentRules[C],
    x: Tensor,
    y: Tensor,
    target: Tensor,
    start: Callable[[Tensor], Tensor],
    batch_size: int | None,
    on_finish: OnFinish | None = None,
    around: tuple[int, int] = (0, 0),
) -> Found:
    """Ascend from `start(rows)` for all N images, at most `batch_size` at once; `on_finish` hears who is done.

    `around`: steps of the ascents that each image makes before and after this one.
    """
    found = Found(x.clone(), x.clone(), x.new_zeros(len(x)), y.new_zeros(len(x), dtype=torch.bool))
    verifier = verifier_of(model)
    confirm = None
    if verifier is not None:
        confirm = partial(_confirmed, verifier, rules.steps)

    def begin(rows: Tensor) -> C:
        return rules.begin(x[rows], y[rows], target[rows], start(rows))

    def finish(rows: Tensor, end: C) -> None:
        fooled = end.fooled
        if verifier is not None:
            fooled = fooled & (end.iteration <= rules.steps)  # what fooled the view at the last step is not confirmed
        found.point[rows] = torch.where(per_image(end.fooled, x), end.seen, end.best)
        found.best[rows] = end.best
        found.loss[rows] = end.best_loss
        found.fooled[rows] = fooled
        if on_finish is not None:
            on_finish(rows, found.point[rows], fooled)

    every = torch.arange(len(x), device=x.device)
    advance = partial(rules.advance, model)
    search_in_batches(every, begin, advance, finish, batch_size, confirm, steps=rules.steps + 1, around=around)
    return found


def _confirmed(verifier: Callable[[Tensor], Tensor], steps: int, state: AscentProgress) -> Tensor:
    """(B,) bool, on the CPU: who is done, except those with steps left that have not fooled the verifier."""
    done = state.done.cpu()
    claims = (state.done & state.fooled & (state.iteration <= steps)).nonzero().squeeze(1)
    if len(claims):
        fooled = full_precision(verifier(state.seen[claims])).argmax(1) != state.y[claims]
        done[claims.cpu()] = fooled.cpu()
    return done
