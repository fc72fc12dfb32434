"""Many small eigenvalue problems on a CPU: rows of a batch shared out to threads, one core each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from vitruvius.analysis._items import rows_of
from vitruvius.analysis._registry import Statistics
from vitruvius.heads import Heads


class Threads:
    """As many workers as PyTorch may use threads; on an accelerator, or with one thread, everything stays here."""

    def __init__(self, pool: ThreadPoolExecutor | None = None, workers: int = 1) -> None:
        self.pool, self.workers = pool, workers

    def ask(self, question: Callable[[Heads], Statistics], heads: Heads) -> Statistics:
        """The answer for all rows."""
        if self.pool is None or heads.q.device.type != "cpu" or len(heads.q) < self.workers:
            return question(heads)
        parts = [rows_of(heads, rows) for rows in torch.arange(len(heads.q)).chunk(self.workers)]
        answers = list(self.pool.map(_without_gradients(question), parts))
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}


@contextmanager
def threads() -> Iterator[Threads]:
    """Workers for a while; PyTorch's own threads are as before afterwards."""
    workers = torch.get_num_threads()
    if workers == 1:
        yield Threads()
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Threads(pool, workers)
    finally:
        torch.set_num_threads(workers)


def _without_gradients(question: Callable[[Heads], Statistics]) -> Callable[[Heads], Statistics]:
    """Whether gradients are kept is a matter of each thread."""
    return torch.no_grad()(question)
