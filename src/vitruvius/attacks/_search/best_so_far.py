"""The worst point for the model found so far, image by image: fooling beats not fooling, then the higher loss wins."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._norms import per_image

T = TypeVar("T")


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
    """As many attempts on so many images as fit into `room` rows, one at least; and the rest of the attempts."""
    count = max(room // images, 1)
    return attempts[:count], attempts[count:]
