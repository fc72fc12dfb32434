"""One epoch: batches through the task, gradients into the optimiser, numbers for the log."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor

from vitruvius._errors import Diverged
from vitruvius._processes import Process
from vitruvius.training._luck import seed_luck
from vitruvius.training._session import Session

LOOK_EVERY = 10  # batches; looking waits for the device
REMEDY = "Lower train.lr, lengthen train.warmup_epochs, set train.clip_grad, or use train.precision=bf16."


class Watcher(Protocol):
    """Told every few batches: batches done, and the means so far."""

    def __call__(self, done: int, numbers: dict[str, float], /) -> None: ...


class Means:
    """Means of what a task reports, over all images of all processes."""

    def __init__(self, process: Process) -> None:
        self.process, self.images = process, 0.0
        self._recent: dict[str, Tensor] = {}
        self._sums: dict[str, float] = {}

    def add(self, numbers: dict[str, Tensor], images: int) -> None:
        """Means of one batch; nothing waits for the device."""
        numbers = {**numbers, "images": torch.ones_like(numbers["loss"])}
        for name, value in numbers.items():
            self._recent[name] = self._recent.get(name, torch.zeros_like(value)) + value * images

    def read(self) -> dict[str, float]:
        """The means so far; the same on every process."""
        recent = self.process.total(torch.stack(list(self._recent.values()))).tolist()
        for name, value in zip(self._recent, recent, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._recent = {}
        self.images = self._sums["images"]
        return {name: value / self.images for name, value in self._sums.items() if name != "images"}


def train_epoch(session: Session, watch: Watcher) -> dict[str, float]:
    """Train on every batch once; the means over the epoch."""
    seed_luck(seed=session.config.seed, epoch=session.epoch, rank=session.process.rank)
    session.task.train()
    loader, means = session.train_loader, Means(session.process)
    loader.set_epoch(session.epoch)
    begun, batches, rate = time.perf_counter(), len(loader), session.optimizer.param_groups[0]["lr"]
    numbers: dict[str, float] = {}
    for number, (x, y) in enumerate(loader):
        rate = session.optimizer.param_groups[0]["lr"]
        means.add(_step(session, x.to(session.process.device), y.to(session.process.device), number, batches), len(x))
        if number % LOOK_EVERY == LOOK_EVERY - 1 or number == batches - 1:
            numbers = means.read()
            _check(session, numbers["loss"], number)
            watch(number + 1, {**numbers, "images": means.images})
    _check_weights(session)
    seconds = time.perf_counter() - begun
    speed = {"lr": rate, "seconds": seconds, "images_per_second": means.images / seconds}
    return {f"train_{name}": value for name, value in numbers.items()} | speed


def _step(session: Session, x: Tensor, y: Tensor, number: int, batches: int) -> dict[str, Tensor]:
    """One batch forward and backward, and an update when enough gradients have gathered."""
    every = session.config.train.grad_accum_steps
    last = (number + 1) % every == 0 or number == batches - 1
    group = min(every, batches - number // every * every)  # the last group may be smaller
    labels = y
    if session.mixer is not None:
        x, y = session.mixer(x, y, epoch=session.epoch, step=number)
    with nullcontext() if last else session.task.no_sync():
        with session.autocast():
            result = session.task(x, y)
        session.scaler.scale(result["loss"] / group).backward()
    if last:
        _update(session)
    accuracy = (result["output"].detach().argmax(-1) == labels).float().mean()
    scalars = {name: value.detach().float() for name, value in result.items() if value.dim() == 0}
    return {**scalars, "accuracy": accuracy}


def _update(session: Session) -> None:
    train = session.config.train
    if train.clip_grad is not None:
        session.scaler.unscale_(session.optimizer)
        parameters: Any = list(session.task.get_clip_parameters(exclude_head=train.clip_mode == "agc"))
        dispatch_clip_grad(parameters, value=train.clip_grad, mode=train.clip_mode)
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad(set_to_none=True)
    session.updates += 1
    session.task.update_ema(step=session.updates)
    if session.scheduler is not None:
        session.scheduler.step_update(session.updates)


def _check(session: Session, loss: float, number: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the training loss is {loss} at batch {number + 1} of epoch {session.epoch + 1}. {REMEDY}")


def _check_weights(session: Session) -> None:
    """The last update may have spoilt the weights without a loss to show it."""
    sizes = torch.stack([p.detach().abs().amax().float() for p in session.model.parameters()])
    if not torch.isfinite(sizes).all():
        raise Diverged(f"weights are no longer finite after epoch {session.epoch + 1}. {REMEDY}")
