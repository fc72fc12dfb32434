"""Keeps a batch full: images that are done leave it at once and waiting ones take their places.

A search is a state (a NamedTuple of tensors, one row per image, `done` among them), a way to begin it and a way to
advance it by one query of the model. Every image keeps its own count of steps, so nothing depends on its neighbours.
Several attempts (restarts, targets) follow one another, on the images that are not fooled yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vitruvius._progress import Progress, no_progress
from vitruvius.attacks.norms import per_image

SMALL_BATCH = 2**16  # pixels: a batch of this many costs hardly more than one image, so digits are searched by hundreds


class State(Protocol):
    """A NamedTuple of tensors with a row for each image being searched."""

    @property
    def done(self) -> Tensor: ...


S = TypeVar("S", bound=State)
T = TypeVar("T")


def search_in_batches(
    images: Tensor,
    begin: Callable[[Tensor], S],
    advance: Callable[[S], S],
    finish: Callable[[Tensor, S], Tensor],
    batch_size: int | None = None,
    confirm: Callable[[S], Tensor] | None = None,
    *,
    steps: int,
    progress: Progress = no_progress,
) -> int:
    """Search for every image, at most `batch_size` of them at once; default all. The number of steps that were made.

    `images` are the indices of the images; `begin` makes the state of some of them, `advance` makes one step, `finish`
    gets those that are done and returns whether each is fooled. The device is read once per step, to learn who is done:
    a few microseconds against a pass of the model. `confirm` says (B,) who really is done, asked where somebody claims
    to be; the others continue. `steps` is at most how many an image takes; `progress` is told how many are made, and at
    most how many there are.
    """
    size = batch_size or max(len(images), 1)
    active, waiting = images[:size], images[size:]
    if not len(active):
        return 0
    state = begin(active)
    age = torch.zeros(len(active), dtype=torch.int64)  # steps of each image, on the CPU
    made = fooled = 0
    while len(active):
        state = advance(state)
        made += 1
        age += 1
        done = state.done.cpu()
        if confirm is not None and done.any():
            done = confirm(state)
        if done.any():
            leaving, staying = _rows(done, images.device), _rows(~done, images.device)
            fooled += int(finish(active[leaving], take(state, leaving)).sum())
            active, state = active[staying], take(state, staying)
            arriving, waiting = waiting[: size - len(active)], waiting[size - len(active) :]
            age = torch.cat([age[~done], torch.zeros(len(arriving), dtype=torch.int64)])
            if len(arriving):
                active = torch.cat([active, arriving])
                state = join(state, begin(arriving))
        if progress is not no_progress:
            most = made + (steps - int(age.min()) if len(age) else 0) + math.ceil(len(waiting) / size) * steps
            progress(made, most, f"step {made} of {most}" + (f", {fooled} broken" if fooled else ""))
    return made


def _rows(chosen: Tensor, device: torch.device) -> Tensor:
    return chosen.nonzero().squeeze(1).to(device)


def take(state: S, rows: Tensor) -> S:
    """The state of some of its images."""
    return type(state)(*(tensor[rows] for tensor in state))  # type: ignore[attr-defined]


def join(first: S, second: S) -> S:
    """The states of two groups of images as one."""
    return type(first)(*(torch.cat(pair) for pair in zip(first, second, strict=True)))  # type: ignore[call-overload]


class BestSoFar:
    """The worst point for the model so far, for each of B images: fooling beats not fooling, then the higher loss.

    It begins with the images `x` (B, ...) themselves.
    """

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

    def offer_attempts(self, rows: Tensor, x: Tensor, fooled: Tensor, loss: Tensor, *, in_turn: bool = True) -> None:
        """Points of several attempts on the same images.

        `in_turn`: a later one counts only where all before it failed, as if made after them; else the best counts.
        """
        every = torch.arange(len(rows), device=rows.device)
        for first in range(0, len(x), max(len(rows), 1)):
            left = (~self.fooled[rows]).nonzero().squeeze(1) if in_turn else every
            self.offer_to(rows[left], x[first + left], fooled[first + left], loss[first + left])

    def not_fooled(self) -> Tensor:
        """Indices of the images for which no point fools the model yet."""
        return (~self.fooled).nonzero().squeeze(1)


def take_chunk(attempts: list[T], room: int, images: int) -> tuple[list[T], list[T]]:
    """Attempts on this many images that fit into `room` rows, one at least, and the rest; chunks are of even size."""
    most = max(room // images, 1)
    chunks = math.ceil(len(attempts) / most)
    count = math.ceil(len(attempts) / chunks)
    return attempts[:count], attempts[count:]


class Attempt(NamedTuple):
    """One search for every image that is not fooled yet."""

    number: int  # among all attempts, for the dice
    target: Tensor  # (B,) for all images; the labels where there is no target
    restart: int  # 0: the first with this target


def attempts_in_turn(
    targets: Iterable[Tensor], restarts: int, room: int, images_left: Callable[[], Tensor]
) -> Iterator[tuple[Tensor, list[Attempt], int, str]]:
    """Attempts on the images that are left: these images, attempts that run side by side, chunks to come, and words.

    `targets` (B,) are tried `restarts` times each, as many in one chunk as fit into `room` rows.
    """
    pairs = [(target, restart) for target in targets for restart in range(restarts)]
    left = [Attempt(number, *pair) for number, pair in enumerate(pairs)]
    while left and len(rows := images_left()):
        chunk, left = take_chunk(left, room, len(rows))
        first, last = chunk[0].number + 1, chunk[-1].number + 1
        words = f"run {first}" if first == last else f"runs {first} to {last}"
        words = f"{words} of {len(pairs)}{' side by side' if first < last else ''}" if len(pairs) > 1 else ""
        yield rows, chunk, math.ceil(len(left) / len(chunk)), words
