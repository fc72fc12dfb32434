"""A model whose passes are recorded once per batch size and replayed (CUDA graphs), so that nobody waits for the host.

A search asks the same model thousands of times, and a small model answers faster than Python can ask: launching a
pass of DeiT-Tiny takes longer than computing it in bfloat16. Batches are padded to a few sizes, and a size is recorded
when it has come up some times. A recording is tried against the model itself before it is used: what does not repeat
itself (random models) or cannot be recorded is called as before, and leaves nothing behind. B images (B, C, H, W).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitruvius._cuda_graphs import CudaGraphRecorder, Recorder
from vitruvius.attacks._models import Wrapper

logger = logging.getLogger(__name__)

PAYS = 16  # calls of one size before it is recorded: recording costs about five
PARTS = 8  # sizes up to the largest batch

Kind = tuple[int, bool, torch.Size, torch.dtype]  # images, with gradients, shape and type of one
LOGITS_ERROR = 1e-3  # relative error of logits that a recording may have
GRAD_ERROR = 1e-2  # relative error of gradients


class GraphedModel(nn.Module, Wrapper):
    """`inner` with recorded passes. `max_images`: the largest batch size; `record` makes the recordings."""

    def __init__(self, inner: nn.Module, max_images: int, record: Recorder | None = None) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.training = inner.training
        self.max_images = max_images
        self.record = record or CudaGraphRecorder()
        self.calls: Counter[Kind] = Counter()
        self.recordings: dict[Kind, RecordedPass] = {}

    def forward(self, x: Tensor) -> Tensor:
        recorded = self._recording(x, with_grad=torch.is_grad_enabled() and x.requires_grad)
        if recorded is None:
            return self.inner(x)
        if not recorded.with_grad:
            return recorded.forward(x)
        return ReplayPass.apply(x, recorded)

    def _recording(self, x: Tensor, *, with_grad: bool) -> RecordedPass | None:
        size = padded_size(len(x), self.max_images)
        if size is None:
            return None
        kind = (size, with_grad, x.shape[1:], x.dtype)
        self.calls[kind] += 1
        if self.calls[kind] == PAYS:
            recorded = try_recording(self.inner, x, size, with_grad, self.record)
            if recorded is not None:
                self.recordings[kind] = recorded
        return self.recordings.get(kind)


def with_cuda_graphs(model: nn.Module, x: Tensor, max_images: int) -> nn.Module:
    """The model with recorded passes where there are CUDA graphs; elsewhere the model."""
    if x.is_cuda and torch.version.cuda:
        return GraphedModel(model, max_images)
    return model


def padded_size(images: int, max_images: int) -> int | None:
    """The batch size to pad to: a multiple of an eighth of `max_images`, a power of two for small batches."""
    if not 0 < images <= max_images:
        return None
    part = max(max_images // PARTS, 1)
    if images <= part // 2:
        return 1 << (images - 1).bit_length()
    return min(-(-images // part) * part, max_images)


class RecordedPass:
    """A pass at one batch size: images, logits and, `with_grad`, the images' gradient, at fixed places in memory."""

    def __init__(self, model: nn.Module, x: Tensor, with_grad: bool, record: Recorder) -> None:
        self.model = model
        self.with_grad = with_grad
        self.x = x.detach().clone().requires_grad_(with_grad)
        self.passes = 0
        record.warm_up(self._forward_backward)
        if not record.has_memory_for(self.bytes_kept):
            raise MemoryError("a recording has memory of its own, and there is not enough for it")
        self.replay_forward = record(self._forward)
        if with_grad:
            self.grad_out = torch.zeros_like(self.logits)
            self.replay_backward = record(self._backward)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images, at most as many as were recorded."""
        self.passes += 1
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.replay_forward()
        return self.logits[: len(x)].detach().clone()

    def backward(self, grad_out: Tensor) -> Tensor:
        """The gradient of the images of the last forward pass."""
        self.grad_out[: len(grad_out)].copy_(grad_out)
        self.grad_out[len(grad_out) :].zero_()
        self.replay_backward()
        return self.grad[: len(grad_out)].clone()

    def _forward_backward(self) -> None:
        """Leaves nothing behind: a graph of autograd that outlives it would tie the recording to another stream."""
        before = allocated(self.x)
        with torch.set_grad_enabled(self.with_grad):
            logits = self.model(self.x)
        self.bytes_kept = allocated(self.x) - before  # for the backward pass
        if self.with_grad:
            torch.autograd.grad(logits, self.x, torch.zeros_like(logits))

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.with_grad):
            self.logits: Tensor = self.model(self.x)

    def _backward(self) -> None:
        (self.grad,) = torch.autograd.grad(self.logits, self.x, self.grad_out, retain_graph=not self.x.is_cuda)


class ReplayPass(torch.autograd.Function):
    """A recorded pass as autograd sees it. If the recording was used again in between, the pass is repeated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorded: RecordedPass) -> Tensor:
        logits = recorded.forward(x)
        ctx.recorded = recorded
        ctx.x = x.detach()
        ctx.passes = recorded.passes
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        if ctx.recorded.passes != ctx.passes:
            ctx.recorded.forward(ctx.x)
            ctx.passes = ctx.recorded.passes
        return ctx.recorded.backward(grad_out), None


def try_recording(model: nn.Module, x: Tensor, size: int, with_grad: bool, record: Recorder) -> RecordedPass | None:
    """A recording for `size` images, if the model can be recorded and the recording agrees with it on other images."""
    images = x.detach()[torch.arange(size, device=x.device) % len(x)]
    try:
        recorded = RecordedPass(model, images, with_grad, record)
        agrees = _agrees(recorded, images.flip(-1))
    except Exception as error:  # whatever cannot be recorded can still be called
        if x.is_cuda:
            torch.cuda.synchronize()
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.debug("passes of %d images are not recorded: %s", size, reason)
        return None
    return recorded if agrees else None


def _agrees(recorded: RecordedPass, x: Tensor) -> bool:
    """Whether the recording gives the model's logits and gradient."""
    if not recorded.with_grad:
        with torch.no_grad():
            return _close(recorded.forward(x), recorded.model(x), LOGITS_ERROR)
    logits, grad = _logits_and_grad(recorded.model, x)
    found_logits, found_grad = _logits_and_grad(lambda x: ReplayPass.apply(x, recorded), x)
    return _close(found_logits, logits, LOGITS_ERROR) and _close(found_grad, grad, GRAD_ERROR)


def _close(found: Tensor, expected: Tensor, error: float) -> bool:
    return bool((found.float() - expected.float()).norm() <= error * expected.float().norm())


def _logits_and_grad(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of some sum of them."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        logits = model(x)
        weights = torch.linspace(-1, 1, logits.shape[1], device=x.device, dtype=logits.dtype)
        (grad,) = torch.autograd.grad((logits * weights).sum(), x)
    return logits.detach(), grad


def allocated(x: Tensor) -> int:
    """Bytes in use on the device of `x`, where it counts them."""
    return torch.cuda.memory_allocated(x.device) if x.is_cuda else 0
