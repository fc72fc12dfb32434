"""One epoch: batches through the task, gradients into the optimiser, numbers for the log."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from timm.utils import dispatch_clip_grad
from torch import Tensor

from vitruvius._errors import VitruviusError
from vitruvius.training._session import Session


class Watcher(Protocol):
    """Told after every batch."""

    def __call__(self, done: int, total: int | None, /, **numbers: float) -> None: ...


class Diverged(VitruviusError, ArithmeticError):
    """The loss is no longer a number."""


def train_epoch(session: Session, watch: Watcher) -> dict[str, float]:
    """Train on every batch once; the means over the epoch."""
    session.task.train()
    loader, process = session.train_loader, session.process
    loader.set_epoch(session.epoch)
    sums = torch.zeros(3, device=process.device, dtype=torch.float64)  # loss, correct, images
    begun, batches = time.perf_counter(), len(loader)
    for number, (x, y) in enumerate(loader):
        sums += _step(session, x.to(process.device), y.to(process.device), number, batches)
        if process.first and (number % 10 == 9 or number == batches - 1):
            loss, correct, images = sums.tolist()
            watch(
                number + 1, batches, loss=loss / images, accuracy=correct / images, images=images * process.world_size
            )
    if process.world_size > 1:
        dist.all_reduce(sums)
    loss, correct, images = sums.tolist()
    if not torch.isfinite(sums[0]):
        raise Diverged(
            f"the training loss of epoch {session.epoch} is {loss / images}. "
            "Lower train.lr, lengthen train.warmup_epochs, set train.clip_grad, or use train.precision=bf16."
        )
    seconds = time.perf_counter() - begun
    return {
        "train_loss": loss / images,
        "train_accuracy": correct / images,
        "lr": session.optimizer.param_groups[0]["lr"],
        "seconds": seconds,
        "images_per_second": images / seconds,
    }


def _step(session: Session, x: Tensor, y: Tensor, number: int, batches: int) -> Tensor:
    """One batch forward and backward, and an update when enough gradients have gathered."""
    every = session.config.train.grad_accum_steps
    last = (number + 1) % every == 0 or number == batches - 1
    group = min(every, batches - number // every * every)  # the last group may be smaller
    labels = y
    if session.mixer is not None:
        x, y = session.mixer(x, y, epoch=session.epoch, step=number)
    with session.autocast():
        result = session.task(x, y)
    if last or session.process.world_size == 1:
        session.scaler.scale(result["loss"] / group).backward()
    else:
        with session.task.no_sync():
            session.scaler.scale(result["loss"] / group).backward()
    if last:
        _update(session)
    correct = (result["output"].detach().argmax(-1) == labels).sum()
    return torch.stack(
        [result["loss"].detach().double() * len(x), correct.double(), correct.new_tensor(len(x)).double()]
    )


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
