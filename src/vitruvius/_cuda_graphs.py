"""CUDA graphs: work that is recorded once and replayed in one launch, so that nobody waits for the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

SPARE = 4  # a recording must fit this many times into the memory that is free


class Recorder(Protocol):
    """Work → its replay; `warm_up` runs what is about to be recorded, so that nothing is met for the first time."""

    def __call__(self, work: Callable[[], None], /) -> Callable[[], None]: ...

    def warm_up(self, work: Callable[[], None], /) -> None: ...

    def has_memory_for(self, bytes_: int, /) -> bool:
        """Whether so much memory can be set aside for a recording, and passes without one still find room."""
        ...


class CudaGraphRecorder:
    """Records by CUDA graphs that share one pool of memory: at any time only one of them may be under way.

    Random numbers of the device follow its generator. A recording that fails would leave the generator unusable: it
    gets a copy of its state then.
    """

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        spare = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                work()
        except Exception:
            generator.graphsafe_set_state(spare)
            torch.cuda.synchronize()
            raise
        return graph.replay

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
