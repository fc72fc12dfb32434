"""One recorded size of a model's passes, as autograd sees it.

A recording is tried against the model itself before it is used: what does not repeat itself (random models) or cannot
be recorded is asked as before.      B images (B, C, H, W)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

CLOSE = {False: 1e-3, True: 1e-2}  # relative error of logits and of gradients that a recording may have


class Record(Protocol):
    """Work → its replay; `rehearse` runs what is about to be recorded, so that nothing is met for the first time."""

    def __call__(self, work: Callable[[], None], /) -> Callable[[], None]: ...

    def rehearse(self, work: Callable[[], None], /) -> None: ...

    def affords(self, bytes_: int, /) -> bool:
        """Whether so much memory can be set aside for a recording, and passes without one still find room."""
        ...


class Tape:
    """One recorded size: images, logits, and with `steep` the gradient of the images, all at fixed places in memory."""

    def __init__(self, model: nn.Module, x: Tensor, steep: bool, record: Record) -> None:
        self.model, self.steep = model, steep
        self.x = x.detach().clone().requires_grad_(steep)
        self.turn = 0
        record.rehearse(self._both)
        if not record.affords(self.weight):
            raise MemoryError("a recording has memory of its own, and there is not enough for it")
        self.there = record(self._there)
        if steep:
            self.slope = torch.zeros_like(self.logits)
            self.back = record(self._back)

    def look(self, x: Tensor) -> Tensor:
        """Logits of some images."""
        self.turn += 1
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.there()
        return self.logits[: len(x)].detach().clone()

    def pull(self, slope: Tensor) -> Tensor:
        """The gradient of the images that were looked at last."""
        self.slope[: len(slope)].copy_(slope)
        self.slope[len(slope) :].zero_()
        self.back()
        return self.grad[: len(slope)].clone()

    def _both(self) -> None:
        """Leaves nothing behind: a graph of autograd that outlives it would tie the recording to another stream."""
        before = allocated(self.x)
        with torch.set_grad_enabled(self.steep):
            logits = self.model(self.x)
        self.weight = allocated(self.x) - before  # what the way back keeps
        if self.steep:
            torch.autograd.grad(logits, self.x, torch.zeros_like(logits))

    def _there(self) -> None:
        with torch.set_grad_enabled(self.steep):
            self.logits: Tensor = self.model(self.x)

    def _back(self) -> None:
        (self.grad,) = torch.autograd.grad(self.logits, self.x, self.slope, retain_graph=not self.x.is_cuda)


class Replay(torch.autograd.Function):
    """A tape as autograd sees it. Another pass of the same tape in between is noticed, and the first one repeated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tape) -> Tensor:
        logits = tape.look(x)
        ctx.tape, ctx.x, ctx.turn = tape, x.detach(), tape.turn
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        if ctx.tape.turn != ctx.turn:
            ctx.tape.look(ctx.x)
            ctx.turn = ctx.tape.turn
        return ctx.tape.pull(slope), None


def try_tape(model: nn.Module, x: Tensor, size: int, steep: bool, record: Record) -> Tape | None:
    """A tape for so many images, if the model can be recorded and the recording says the same about other images."""
    images = x.detach()[torch.arange(size, device=x.device) % len(x)]
    other = images.flip(-1)
    try:
        tape = Tape(model, images, steep, record)
        expected = _answers(model, other, steep)
        found = _answers(lambda x: Replay.apply(x, tape) if steep else tape.look(x), other, steep)
    except Exception as error:  # whatever cannot be recorded can still be asked
        if x.is_cuda:
            torch.cuda.synchronize()
        logger.info(
            "passes of %d images are not recorded: %s", size, (str(error) or type(error).__name__).splitlines()[0]
        )
        return None
    same = all(
        bool((a - b).norm() <= CLOSE[number > 0] * b.norm())
        for number, (a, b) in enumerate(zip(found, expected, strict=True))
    )
    return tape if same else None


def _answers(model: Callable[[Tensor], Tensor], x: Tensor, steep: bool) -> list[Tensor]:
    """Logits, and the gradient of some sum of them."""
    if not steep:
        with torch.no_grad():
            return [model(x).float()]
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        logits = model(x)
        weights = torch.linspace(-1, 1, logits.shape[1], device=x.device, dtype=logits.dtype)
        (grad,) = torch.autograd.grad((logits * weights).sum(), x)
    return [logits.detach().float(), grad.float()]


def allocated(x: Tensor) -> int:
    """Bytes in use on the device of `x`, where it counts them."""
    return torch.cuda.memory_allocated(x.device) if x.is_cuda else 0
