"""A model whose passes are recorded once per batch size and replayed (CUDA graphs), so that nobody waits for the host.

A search asks the same model thousands of times, and a small model answers faster than Python can ask: launching a
pass of DeiT-Tiny takes longer than computing it in bfloat16. Batches are padded to a few sizes, and a size is recorded
when it has come up some times. A recording that fails leaves nothing behind.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius.attacks._models import ModelWrapper
from vitruvius.attacks._views.recorded_pass import RecordedPass, Recorder, ReplayPass, try_recording

PAYS = 16  # calls of one size before it is recorded: recording costs about five
PARTS = 8  # sizes up to the largest batch
SPARE = 4  # a recording must fit this many times into the memory that is free

Kind = tuple[int, bool, torch.Size, torch.dtype]  # images, with gradients, shape and type of one


class GraphedModel(nn.Module, ModelWrapper):
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
            logits: Tensor = self.inner(x)
            return logits
        if not recorded.with_grad:
            return recorded.forward(x)
        replayed: Tensor = ReplayPass.apply(x, recorded)
        return replayed

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


class CudaGraphRecorder:
    """Records by CUDA graphs that share one pool of memory: at any time only one pass is under way."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with separate_rng_state(), torch.cuda.graph(graph, pool=self.pool):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def has_memory_for(self, bytes_: int) -> bool:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused > SPARE * bytes_

    def warm_up(self, work: Callable[[], None]) -> None:
        """Twice on another stream, the second time as if recorded: what waits for the device is an error."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            with synchronisation_refused():
                work()
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def synchronisation_refused() -> Iterator[None]:
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
def separate_rng_state() -> Iterator[None]:
    """A recording that fails would leave the GPU's generator unusable: it gets a copy of its state."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)
