"""Keeps a batch full: images that are done leave it at once and waiting ones take their places.

A search is a state (a NamedTuple of tensors, one row an image, `done` among them), a way to begin it and a way to
advance it by one query of the model. Every image keeps its own count of steps, so nothing depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor


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
) -> None:
    """Search for every image, at most `batch_size` of them at once.

    `images` are the indices of the images; `begin` makes the state of some of them, `finish` gets those that are done.
    The device is read once a round, to learn who is done: a few microseconds against a pass of the model. Who is done
    and has `confirm` against it, (B,) False, is not done and goes on.
    """
    room = batch_size or max(len(images), 1)
    active, waiting = images[:room], images[room:]
    if not len(active):
        return
    state = begin(active)
    while len(active):
        state = advance(state)
        over = state.done.cpu()
        if confirm is not None and over.any():
            over = confirm(state)
        if not over.any():
            continue
        done, left = (rows.nonzero().squeeze(1).to(images.device) for rows in (over, ~over))
        finish(active[done], take(state, done))
        active, state = active[left], take(state, left)
        arrivals, waiting = waiting[: room - len(active)], waiting[room - len(active) :]
        if len(arrivals):
            active, state = torch.cat([active, arrivals]), join(state, begin(arrivals))


def take(state: S, rows: Tensor) -> S:
    """The state of some of its images."""
    return type(state)(*(tensor[rows] for tensor in state))  # type: ignore[attr-defined]


def join(first: S, second: S) -> S:
    """The states of two groups of images as one."""
    return type(first)(*(torch.cat(pair) for pair in zip(first, second, strict=True)))  # type: ignore[call-overload]
