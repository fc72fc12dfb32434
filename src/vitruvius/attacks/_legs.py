"""One leg of an attack: an ascent for every image, in batches that stay full. N images, all that still stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._models import full_precision, judge_of
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._stream import stream


class Standing(Protocol):
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


C = TypeVar("C", bound=Standing)


class Leg(Protocol[C]):
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


def climb(
    model: Callable[[Tensor], Tensor],
    leg: Leg[C],
    x: Tensor,
    y: Tensor,
    target: Tensor,
    start: Callable[[Tensor], Tensor],
    batch_size: int | None,
) -> Found:
    """Climb from `start(rows)` for all images, at most `batch_size` at once."""
    found = Found(x.clone(), x.clone(), x.new_zeros(len(x)), y.new_zeros(len(x), dtype=torch.bool))

    def begin(rows: Tensor) -> C:
        return leg.begin(x[rows], y[rows], target[rows], start(rows))

    def finish(rows: Tensor, end: C) -> None:
        found.point[rows] = torch.where(per_image(end.fooled, x), end.seen, end.best)
        fooled = end.fooled if judge is None else end.fooled & (end.iteration <= leg.steps)  # the last is not confirmed
        found.best[rows], found.loss[rows], found.fooled[rows] = end.best, end.best_loss, fooled

    rows, judge = torch.arange(len(x), device=x.device), judge_of(model)
    confirm = None if judge is None else lambda state: confirmed(judge, state, leg.steps)
    stream(rows, begin, lambda state: leg.advance(model, state), finish, batch_size, confirm)
    return found


def confirmed(judge: Callable[[Tensor], Tensor], state: Standing, steps: int) -> Tensor:
    """(B,) bool, on the CPU: who is done, but for those with steps left that have not fooled the judge."""
    over = state.done.cpu()
    claims = (state.done & state.fooled & (state.iteration <= steps)).nonzero().squeeze(1)
    if len(claims):
        fooled = full_precision(judge(state.seen[claims])).argmax(1) != state.y[claims]
        over[claims.cpu()] = fooled.cpu()
    return over
