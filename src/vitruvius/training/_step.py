"""One batch: forward through the task, backward, and an update when enough gradients have gathered.

A task with `replays` is given the same batch that many times in a row, each an update of its own (free adversarial
training); one with `at(epoch=, update=, updates_per_epoch=)` is told before every update how far the run has come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vitruvius._errors import DataError
from vitruvius.training._fast.regions import Regions
from vitruvius.training._fast.session_step import FastStep, SessionStep, obstacle
from vitruvius.training._guards.nonfinite import all_finite, is_finite
from vitruvius.training._session import Session

logger = logging.getLogger(__name__)

Numbers = dict[str, Tensor]


class NonFiniteLoss(Exception):
    """A non-finite loss, seen before it has reached the weights."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss.detach()


def train_batch(session: Session, x: Tensor, y: Tensor, number: int, batches: int) -> Numbers | None:
    """What the task reports of a batch, a mean over its replays; None for one that was left out."""
    labels = y
    if session.mixer is not None:
        x, y = session.mixer(x, y, epoch=session.epoch, step=number)
    reports = []
    for _ in range(session.task.replays):
        session.task.at(epoch=session.epoch, update=session.updates, updates_per_epoch=session.updates_per_epoch)
        if session.fast_step is not None:
            report: Numbers | None = _fast_step(session, session.fast_step, x, y, labels)
        else:
            report = _forward_backward(session, x, y, labels, number, batches)
        if report is not None:
            reports.append(report)
    return _mean(reports)


def pass_over(session: Session, number: int, batches: int) -> None:
    """A batch of which no image could be read: updates that follow it are made of what has gathered, and counted."""
    process = session.process
    if process.world_size > 1:
        raise DataError(
            f"none of the images of batch {number + 1} of process {process.rank + 1} of {process.world_size} could be "
            "read, and the other processes wait for its gradients. Repair or remove them, or use larger batches."
        )
    if not ends_group(session, number, batches):
        return
    for _ in range(session.task.replays):
        if _has_gradients(session):
            update(session)
        else:
            _advance(session)


def _has_gradients(session: Session) -> bool:
    """Whether earlier batches of the group have left gradients; a fast step uses its own at once."""
    groups = session.optimizer.param_groups
    return session.fast_step is None and any(p.grad is not None for group in groups for p in group["params"])


def _mean(reports: list[Numbers]) -> Numbers | None:
    if not reports:
        return None
    if len(reports) == 1:
        return reports[0]
    return {name: torch.stack([report[name] for report in reports]).mean(0) for name in reports[0]}


def ends_group(session: Session, number: int, batches: int) -> bool:
    """Whether an update follows this batch."""
    return (number + 1) % session.config.train.grad_accum_steps == 0 or number == batches - 1


def _forward_backward(
    session: Session, x: Tensor, y: Tensor, labels: Tensor, number: int, batches: int
) -> Numbers | None:
    if session.config.train.nonfinite != "skip":
        result = _pass(session, x, y, number, batches)
        if ends_group(session, number, batches):
            update(session)
        return _report(result, labels)
    statistics = Statistics(session.model)
    result = _pass(session, x, y, number, batches)
    fine = is_finite(session.process, result["loss"])
    if not fine:
        statistics.restore()
        session.group_nonfinite = True
    if ends_group(session, number, batches):
        update(session)
    if not fine:
        return None
    return _report(result, labels)


def _pass(session: Session, x: Tensor, y: Tensor, number: int, batches: int) -> dict[str, Tensor]:
    """What the task makes of a batch, after its backward pass; gradients gather until their group is whole."""
    every = session.config.train.grad_accum_steps
    last = ends_group(session, number, batches)
    group = min(every, batches - number // every * every)  # the last group may be smaller
    torch.compiler.cudagraph_mark_step_begin()  # what CUDA graphs gave for the last batch may be written over
    with nullcontext() if last else session.task.no_sync():
        with session.autocast():
            result: dict[str, Tensor] = session.task(x, y)
        if session.careful and not is_finite(session.process, result["loss"]):
            raise NonFiniteLoss(result["loss"])
        session.scaler.scale(result["loss"] / group).backward()
    return result


def _fast_step(session: Session, step: FastStep, x: Tensor, y: Tensor, labels: Tensor) -> Numbers:
    """A step that may be a recording: the same work in the same order, the host's part of it afterwards."""
    settings = session.task.recording_key()
    numbers = step(x, y, labels, settings=settings)
    _advance(session)
    return numbers


def compiles(session: Session) -> bool:
    """Whether the first batch waits for the compiler."""
    if session.config.train.compile == "auto":
        return session.fast_step is not None and session.fast_step.step.regions is not None
    return bool(session.config.train.compile)


def make_fast_step(session: Session, tell: Callable[[str], None] = logger.info) -> FastStep | None:
    """What `train.compile: auto` makes of the steps of a session; None, and a line in the log, if it makes nothing."""
    if session.config.train.compile != "auto":
        return None
    reason = obstacle(session.config, session.process, session.task)
    if reason:
        logger.debug("train.compile = auto: steps are run as they are, since %s", reason)
        return None

    def forward(x: Tensor, y: Tensor, labels: Tensor) -> tuple[Tensor, Numbers]:
        with session.autocast():
            result = session.task(x, y)
        return result["loss"], _report(result, labels)

    session.task.read_settings_from(session.process.device)
    has_penalties = session.task.penalties is not None  # hooks inside the blocks
    regions = None if has_penalties else Regions(session.model)
    step = SessionStep(session.task, session.optimizer, forward, lambda: _apply(session), regions=regions)
    return FastStep(step, tell=tell)


def _report(result: dict[str, Tensor], labels: Tensor) -> Numbers:
    output = result["output"].detach()
    accuracy = (output.argmax(-1) == labels[: len(output)]).float().mean()
    scalars = {name: value.detach().float() for name, value in result.items() if value.dim() == 0}
    return {**scalars, "accuracy": accuracy}


def update(session: Session) -> None:
    """Gradients into the weights, unless they are not finite; the average and the schedule follow."""
    if _is_nonfinite(session):
        session.skipped += 1
        session.optimizer.zero_grad(set_to_none=True)
    else:
        _apply(session, average=not session.group_nonfinite)
    session.group_nonfinite = False
    _advance(session)


def _apply(session: Session, *, average: bool = True) -> None:
    """Clip, update, forget the gradients, and take the new weights into their average: all on the device."""
    train = session.config.train
    if train.clip_grad is not None:
        parameters: Any = list(session.task.get_clip_parameters(exclude_head=train.clip_mode == "agc"))
        session.scaler.unscale_(session.optimizer)
        dispatch_clip_grad(parameters, value=train.clip_grad, mode=train.clip_mode)
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad(set_to_none=True)
    if average:
        session.task.update_ema(step=session.updates + 1)


def _advance(session: Session) -> None:
    """Count the update and move the schedule."""
    session.updates += 1
    if session.scheduler is not None:
        session.scheduler.step_update(session.updates)


def _is_nonfinite(session: Session) -> bool:
    """With `nonfinite: skip`: whether a loss or a gradient of this update is not finite (fp16 has its scaler)."""
    if session.config.train.nonfinite != "skip":
        return False
    if not session.group_nonfinite and not session.scaler.is_enabled():
        groups = session.optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        session.group_nonfinite = not all_finite(session.process, gradients)
    return session.group_nonfinite


def check_weights(session: Session) -> bool:
    """Whether all weights are finite: the last update may have made them non-finite without a loss that shows it."""
    parameters = [p.detach() for p in session.model.parameters()]
    return all_finite(session.process, parameters)


class Statistics:
    """A copy of the running means and variances of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [
            buffer for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers()
        ]
        self.copies = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """As they were."""
        for buffer, copy in zip(self.buffers, self.copies, strict=True):
            buffer.copy_(copy)
