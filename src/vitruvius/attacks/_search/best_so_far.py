"""The worst point for the model found so far, image by image: fooling beats not fooling, then the higher loss wins."""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.watch import current_watch


class Numbered(Protocol):
    """An attempt, by its number among all attempts, from 0."""

    @property
    def number(self) -> int: ...


T = TypeVar("T")
N = TypeVar("N", bound=Numbered)


class BestSoFar:
    """Keeps the best of several attempts on each of B images, beginning with the images themselves."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.fooled = x.new_zeros(len(x), dtype=torch.bool)
        self.loss = x.new_full((len(x),), -torch.inf)

    def offer(self, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points for all images, whether they fool the model (B,), and their losses (B,)."""
        better = (fooled > self.fooled) | ((fooled == self.fooled) & (loss > self.loss))
        self.x = torch.where(per_image(better, x), x, self.x)
        self.fooled = torch.where(better, fooled, self.fooled)
        self.loss = torch.where(better, loss, self.loss)

    def offer_to(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points for some of the images."""
        part = BestSoFar(self.x[rows])
        part.fooled = self.fooled[rows]
        part.loss = self.loss[rows]
        part.offer(x, fooled, loss)
        self.x = self.x.index_copy(0, rows, part.x)
        self.fooled = self.fooled.index_copy(0, rows, part.fooled)
        self.loss = self.loss.index_copy(0, rows, part.loss)

    def offer_in_turn(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points of several attempts on the same images; a later one counts only where all before it failed."""
        for start in range(0, len(x), max(len(rows), 1)):
            left = (~self.fooled[rows]).nonzero().squeeze(1)
            self.offer_to(rows[left], x[start + left], fooled[start + left], loss[start + left])

    def offer_each(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points of several attempts on the same images, of which the best counts."""
        for start in range(0, len(x), max(len(rows), 1)):
            end = start + len(rows)
            self.offer_to(rows, x[start:end], fooled[start:end], loss[start:end])

    def not_fooled(self) -> Tensor:
        """Indices of the images for which no point fools the model yet."""
        return (~self.fooled).nonzero().squeeze(1)


def take_chunk(attempts: list[T], room: int, images: int) -> tuple[list[T], list[T]]:
    """Attempts on this many images that fit into `room` rows, one at least, and the rest; chunks are of even size."""
    most = max(room // images, 1)
    chunks = math.ceil(len(attempts) / most)
    count = math.ceil(len(attempts) / chunks)
    return attempts[:count], attempts[count:]


class AttemptWatch:
    """Tells whoever watches how the attempts of one search go, and leaves out those made before an interruption."""

    def __init__(self, attempts: int, *, decides: bool = True) -> None:
        """How many attempts there are, and whether the first that fools an image decides about it."""
        self.watch = current_watch()
        self.attempts = attempts
        self.decides = decides
        self.made = self.watch.attempts_made()
        self.rows = torch.empty(0, dtype=torch.int64)
        self.numbers: list[int] = []

    def resume(self, chunk: list[N], rest: list[N], rows: Tensor) -> tuple[list[N], list[N], Tensor]:
        """The attempts to make now, the rest, and the rows to make them on: those that have not been through them."""
        if self.made is None or not bool((self.made[rows] > chunk[0].number).any()):
            return chunk, rest, rows
        return chunk[:1], [*chunk[1:], *rest], rows[self.made[rows] <= chunk[0].number]

    def begin(self, chunk: list[N], rows: Tensor) -> None:
        self.numbers = [attempt.number for attempt in chunk]
        self.rows = rows
        self.watch.begin(self.numbers[0], self.attempts, len(rows) * len(chunk), len(chunk))

    def finished(self, places: Tensor, points: Tensor, fooled: Tensor) -> None:
        """Searches at these places of the chunk have ended; of several side by side only the end decides."""
        if len(self.numbers) > 1 or not self.decides:
            self.watch.searched(len(places), 0)
            return
        rows = self.rows[places]
        self.watch.searched(len(places), int(fooled.sum()))
        if self.attempts == 1:
            self.watch.settled(rows, points)
            return
        self.watch.settled(rows[fooled], points[fooled])
        self.watch.attempted(self.numbers[0], rows[~fooled])

    def end(self, best: BestSoFar) -> None:
        """All attempts of the chunk have been made."""
        if len(self.numbers) > 1 and self.decides:
            fooled = best.fooled[self.rows]
            broken = self.rows[fooled]
            self.watch.settled(broken, best.x[broken])
            self.watch.attempted(self.numbers[-1], self.rows[~fooled])
