"""The worst point offered so far, image by image: fooling beats not fooling, then the higher loss wins."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._norms import per_image

T = TypeVar("T")


def take_chunk(attempts: list[T], room: int, standing: int) -> tuple[list[T], list[T]]:
    """As many attempts at once as there is room for with so many images standing, and the rest."""
    count = max(room // standing, 1)
    return attempts[:count], attempts[count:]


class BestSoFar:
    """Keeps the worst of several answers to each of B images, beginning with the images themselves."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.fooled = x.new_zeros(len(x), dtype=torch.bool)
        self.loss = x.new_full((len(x),), -torch.inf)

    def offer(self, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points for all images."""
        better = (fooled > self.fooled) | ((fooled == self.fooled) & (loss > self.loss))
        self.x = torch.where(per_image(better, x), x, self.x)
        self.fooled = torch.where(better, fooled, self.fooled)
        self.loss = torch.where(better, loss, self.loss)

    def offer_to(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points for some of the images."""
        mine = BestSoFar.__new__(BestSoFar)
        mine.x, mine.fooled, mine.loss = self.x[rows], self.fooled[rows], self.loss[rows]
        mine.offer(x, fooled, loss)
        self.x = self.x.index_copy(0, rows, mine.x)
        self.fooled = self.fooled.index_copy(0, rows, mine.fooled)
        self.loss = self.loss.index_copy(0, rows, mine.loss)

    def offer_in_turn(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor) -> None:
        """Points of several attempts on the same images; a later one counts only where all before it failed."""
        for start in range(0, len(x), max(len(rows), 1)):
            mine = (~self.fooled[rows]).nonzero().squeeze(1)
            self.offer_to(rows[mine], x[start + mine], fooled[start + mine], loss[start + mine])

    def not_fooled(self) -> Tensor:
        """Indices of the images that no point has fooled yet."""
        return (~self.fooled).nonzero().squeeze(1)
