"""A model whose passes are recorded once for a number of images and replayed (CUDA graphs): nobody waits for the host.

A search asks the same model thousands of times, and a small model answers faster than Python can ask: launching a
pass of DeiT-Tiny takes longer than computing it in bfloat16. Numbers of images are rounded up to a few sizes, and a
size is recorded when it has come up some times. A recording is tried against the model itself before it is used:
what does not repeat itself (random models) or cannot be recorded is asked as before.      B images (B, C, H, W)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitruvius.attacks._models import Around

PAYS = 16  # calls of one size before it is recorded: recording costs about five
PARTS = 8  # sizes up to the largest batch
CLOSE = {False: 1e-3, True: 1e-2}  # relative error of logits and of gradients that a recording may have


class Record(Protocol):
    """Work → its replay; `rehearse` runs what is about to be recorded, so that nothing is met for the first time."""

    def __call__(self, work: Callable[[], None], /) -> Callable[[], None]: ...

    def rehearse(self, work: Callable[[], None], /) -> None: ...


class Replayed(nn.Module, Around):
    """`inner` with recorded passes. `room`: the most images in a batch."""

    def __init__(self, inner: nn.Module, room: int, record: Record | None = None) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.training, self.room = inner.training, room
        self.record = record or Recorder()
        self.calls: Counter[tuple[int, bool]] = Counter()
        self.tapes: dict[tuple[int, bool], Tape] = {}

    def forward(self, x: Tensor) -> Tensor:
        tape = self._tape(x, steep=torch.is_grad_enabled() and x.requires_grad)
        if tape is None:
            logits: Tensor = self.inner(x)
            return logits
        if not tape.steep:
            return tape.look(x)
        replayed: Tensor = Replay.apply(x, tape)
        return replayed

    def _tape(self, x: Tensor, *, steep: bool) -> Tape | None:
        size = rounded(len(x), self.room)
        if size is None:
            return None
        key = (size, steep)
        self.calls[key] += 1
        if self.calls[key] == PAYS:
            tape = try_tape(self.inner, x, size, steep, self.record)
            if tape is not None:
                self.tapes[key] = tape
        return self.tapes.get(key)


def replayed(model: nn.Module, x: Tensor, room: int) -> nn.Module:
    """The model with recorded passes where there are CUDA graphs; elsewhere the model."""
    return Replayed(model, room) if x.is_cuda and torch.version.cuda else model


def rounded(images: int, room: int) -> int | None:
    """The size that so many images are padded to: an eighth of the room or more of them, below that a power of two."""
    part = max(room // PARTS, 1)
    if not 0 < images <= room:
        return None
    return min(-(-images // part) * part, room) if images > part // 2 else 1 << (images - 1).bit_length()


class Tape:
    """One recorded size: images, logits, and with `steep` the gradient of the images, all at fixed places in memory."""

    def __init__(self, model: nn.Module, x: Tensor, steep: bool, record: Record) -> None:
        self.model, self.steep = model, steep
        self.x = x.detach().clone().requires_grad_(steep)
        self.turn = 0
        record.rehearse(self._both)
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
        with torch.set_grad_enabled(self.steep):
            logits = self.model(self.x)
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
    except Exception:  # whatever cannot be recorded can still be asked
        if x.is_cuda:
            torch.cuda.synchronize()
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


class Recorder:
    """Records by CUDA graphs that share one pool of memory: at any time only one pass is under way."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with other_dice(), torch.cuda.graph(graph, pool=self.pool):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def rehearse(self, work: Callable[[], None]) -> None:
        """Twice on a stream aside, the second time as if recorded: what waits for the device is an error."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            with waiting_refused():
                work()
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Inside, what waits for the device is an error."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def other_dice() -> Iterator[None]:
    """A recording that fails would leave the GPU's dice unusable: it gets a copy of them."""
    dice = torch.cuda.default_generators[torch.cuda.current_device()]
    mine = dice.graphsafe_get_state()
    dice.graphsafe_set_state(dice.clone_state())
    try:
        yield
    finally:
        dice.graphsafe_set_state(mine)
