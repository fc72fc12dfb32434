"""`train.compile: auto`: the steps of a session by compiled blocks and recorded CUDA graphs, where both are safe.

On a CPU nothing is compiled: waiting for the compiler costs more than small models take to train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from vitruvius._cuda_graphs import CudaGraphRecorder
from vitruvius._processes import Process
from vitruvius.tasks import Objective
from vitruvius.training._fast.recorded_step import Gradients, Numbers, Record, StepRecorder
from vitruvius.training._fast.regions import Regions
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)


def why_not_recorded(config: Config, process: Process, task: Objective) -> str:
    """Why the steps of a session are run as they are; nothing if they can be faster."""
    train = config.train
    if not hasattr(torch.get_device_module(process.device), "CUDAGraph"):
        return f"on a {process.device.type} device steps are not recorded"
    if process.grouped:
        return "steps of a process group wait for each other"
    if train.precision == "fp16":
        return "the gradient scaler of fp16 waits for the device"
    if train.nonfinite == "skip":
        return "train.nonfinite = skip looks at every loss"
    if max(train.grad_accum_steps, task.replays) > 1:
        return "an update is not one batch"
    if config.gradual is not None:
        return "gradual masks change between epochs"
    return ""


class SessionStep:
    """Forward, backward and update of a session, as the recorder wants them."""

    def __init__(
        self,
        task: Objective,
        optimizer: torch.optim.Optimizer,
        forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Numbers]],
        update: Callable[[], None],
        *,
        regions: Regions | None,
    ) -> None:
        """`forward` gives the loss and the numbers for the log; `update` turns gradients into weights."""
        self.task = task
        self.optimizer = optimizer
        self.forward = forward
        self.update = update
        self.regions = regions
        groups = optimizer.param_groups
        self.parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self.rates = torch.zeros(len(groups), device=self.parameters[0].device)
        self.records_update = is_capturable(optimizer)

    def read_rates(self) -> None:
        """Copy the learning rates to where a recorded update finds them."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rates.copy_(torch.tensor(rates), non_blocking=True)

    def gradients(self, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        """Forward and backward, by compiled blocks unless they cannot be compiled."""
        if self.regions is not None:
            kept = [buffer.clone() for buffer in self.buffers()]
            try:
                return self._gradients(self.regions, x, y, labels)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                if x.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise
                self._without_regions(error, kept)
        return self._gradients(None, x, y, labels)

    def _without_regions(self, error: Exception, buffers: list[Tensor]) -> None:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("the model's blocks cannot be compiled, training continues without: %s", reason)
        self.regions = None
        self.put(None)
        with torch.no_grad():
            for buffer, kept in zip(self.buffers(), buffers, strict=True):
                buffer.copy_(kept)

    def put(self, gradients: Gradients | None) -> None:
        """Give every parameter its gradient, or none."""
        if gradients is None:
            gradients = [None] * len(self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def apply(self) -> None:
        """One update; rates are read from the device where it is recorded."""
        if not self.records_update:
            self.update()
            return
        with self._rates_on_device():
            self.update()

    def buffers(self) -> list[Tensor]:
        """Running statistics."""
        return [buffer for buffer in self.task.buffers() if buffer is not None]

    def _gradients(self, regions: Regions | None, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        with nullcontext() if regions is None else regions.compiled():
            loss, numbers = self.forward(x, y, labels)
            loss.backward()
        return numbers, [parameter.grad for parameter in self.parameters]

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Inside, the optimiser reads its rates from a tensor; outside they are numbers, as schedulers write them."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable


class FastStep:
    """One step of a session: recorded where it can be."""

    def __init__(self, step: SessionStep, record: Record | None = None) -> None:
        self.step = step
        self.recorder = StepRecorder(step, record or CudaGraphRecorder(), whole=step.records_update)

    def __call__(self, x: Tensor, y: Tensor, labels: Tensor, *, settings: Hashable) -> Numbers:
        """Numbers for the log; the weights are updated."""
        self.step.read_rates()
        return self.recorder(x, y, labels, settings=settings)


def make_fast_step(
    config: Config,
    process: Process,
    model: nn.Module,
    task: Objective,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Numbers]],
    update: Callable[[], None],
) -> FastStep | None:
    """What `train.compile: auto` makes of the steps of a session; None, and a line in the log, if it makes nothing.

    `forward` gives the loss and the numbers for the log; `update` turns gradients into weights.
    """
    if config.train.compile != "auto":
        return None
    reason = why_not_recorded(config, process, task)
    if reason:
        logger.debug("train.compile = auto: steps are run as they are, since %s", reason)
        return None
    task.read_settings_from(process.device)
    has_penalties = task.penalties is not None  # hooks inside the blocks
    regions = None if has_penalties else Regions(model)
    return FastStep(SessionStep(task, optimizer, forward, update, regions=regions))


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update is PyTorch's own in one kernel, which keeps its step and its rate on the device."""
    own = type(optimizer).__module__.startswith("torch.optim")
    return own and all(group.get("fused") for group in optimizer.param_groups)
