"""Work recorded as CUDA graphs, so that a recording that fails leaves nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SPARE = 4  # a recording must fit so many times into the memory that is free


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

    def affords(self, bytes_: int) -> bool:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused > SPARE * bytes_

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
