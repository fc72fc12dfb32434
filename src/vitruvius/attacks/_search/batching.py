"""Keeps a batch full: images that are done leave it at once and waiting ones take their places.

A search is a state (a NamedTuple of tensors, one row per image, `done` among them), a way to begin it and a way to
advance it by one query of the model. Every image keeps its own count of steps, so nothing depends on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vitruvius.attacks._search.watch import UNWATCHED, current_watch

SMALL_BATCH = 2**16  # pixels: a batch of this many costs hardly more than one image, so digits are searched by hundreds


class State(Protocol):
    """A NamedTuple of tensors with a row for each image being searched."""

    @property
    def done(self) -> Tensor: ...


S = TypeVar("S", bound=State)


def search_in_batches(
    images: Tensor,
    begin: Callable[[Tensor], S],
    advance: Callable[[S], S],
    finish: Callable[[Tensor, S], None],
    batch_size: int | None = None,
    confirm: Callable[[S], Tensor] | None = None,
    *,
    steps: int,
    around: tuple[int, int] = (0, 0),
) -> None:
    """Search for every image, at most `batch_size` of them at once; default all.

    `images` are the indices of the images; `begin` makes the state of some of them, `advance` makes one step, `finish`
    gets those that are done. The device is read once per step, to learn who is done: a few microseconds against a pass
    of the model. `confirm` says (B,) who really is done, asked where somebody claims to be; the others go on.
    `steps` is at most how many an image takes here, `around` how many it takes in searches before and after this one
    that belong to the same attempt: whoever watches is told how many are left.
    """
    room = batch_size or max(len(images), 1)
    countdown = Countdown(len(images), room, steps, around)
    active = images[:room]
    waiting = images[room:]
    if not len(active):
        return
    state = begin(active)
    while len(active):
        state = advance(state)
        countdown.step()
        done = _who_is_done(state, confirm)
        if not done.any():
            continue
        leaving = _rows(done, images.device)
        staying = _rows(~done, images.device)
        finish(active[leaving], take(state, leaving))
        active = active[staying]
        state = take(state, staying)
        arriving = waiting[: room - len(active)]
        waiting = waiting[len(arriving) :]
        countdown.exchange(~done, len(arriving))
        if len(arriving):
            active = torch.cat([active, arriving])
            state = join(state, begin(arriving))


class Countdown:
    """At most how many steps a batch of `room` still takes until all `images` are searched, with `steps` for each.

    `around`: steps of each image before and after this search.
    """

    def __init__(self, images: int, room: int, steps: int, around: tuple[int, int] = (0, 0)) -> None:
        self.room = room
        self.steps = steps
        turns = math.ceil(images / room)
        self.later = turns * around[1]
        self.waiting = max(images - room, 0)
        self.left = torch.full((min(images, room),), steps)  # for each image of the batch, on the CPU
        self.most = turns * sum(around) + turns * steps
        self.watch = current_watch()

    def remaining(self) -> int:
        """Until the last image of the batch is through, and then those that wait, a batch at a time."""
        now = 0
        if len(self.left):
            now = int(self.left.max())
        return now + math.ceil(self.waiting / self.room) * self.steps + self.later

    def step(self) -> None:
        """All images of the batch have made a step."""
        self.left = (self.left - 1).clamp(min=0)
        if self.watch is not UNWATCHED:
            self.watch.stepped(self.remaining(), self.most)

    def exchange(self, staying: Tensor, arriving: int) -> None:
        """Only images that are `staying` (B,) are left, and others take the free places."""
        self.waiting -= arriving
        self.left = torch.cat([self.left[staying], torch.full((arriving,), self.steps)])


def _who_is_done(state: S, confirm: Callable[[S], Tensor] | None) -> Tensor:
    """(B,) bool, on the CPU."""
    done = state.done.cpu()
    if confirm is not None and done.any():
        return confirm(state)
    return done


def _rows(chosen: Tensor, device: torch.device) -> Tensor:
    return chosen.nonzero().squeeze(1).to(device)


def take(state: S, rows: Tensor) -> S:
    """The state of some of its images."""
    return type(state)(*(tensor[rows] for tensor in state))  # type: ignore[attr-defined]


def join(first: S, second: S) -> S:
    """The states of two groups of images as one."""
    return type(first)(*(torch.cat(pair) for pair in zip(first, second, strict=True)))  # type: ignore[call-overload]
