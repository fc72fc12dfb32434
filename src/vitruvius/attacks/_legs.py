"""One leg of an attack: an ascent for every image, in batches that stay full. N images, all that still stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._norms import per_image
from vitruvius.attacks._stream import stream


class Standing(Protocol):
    """What the states of all ascents tell."""

    @property
    def seen(self) -> Tensor: ...
    @property
    def best(self) -> Tensor: ...
    @property
    def best_loss(self) -> Tensor: ...
    @property
    def fooled(self) -> Tensor: ...
    @property
    def done(self) -> Tensor: ...


C = TypeVar("C", bound=Standing)


class Leg(Protocol[C]):
    """Rules of an ascent."""

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
        found.best[rows], found.loss[rows], found.fooled[rows] = end.best, end.best_loss, end.fooled

    stream(torch.arange(len(x), device=x.device), begin, lambda state: leg.advance(model, state), finish, batch_size)
    return found
