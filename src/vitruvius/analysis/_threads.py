"""Many small eigenvalue problems on a CPU: rows of a batch shared out to threads, one core each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from vitruvius._dice import Dice
from vitruvius.analysis._items import rows_of
from vitruvius.analysis._nulls import NULLS
from vitruvius.analysis._registry import Statistics
from vitruvius.heads import Heads

T = TypeVar("T")


class Threads:
    """As many workers as PyTorch may use threads; on an accelerator, or with one thread, everything stays here."""

    def __init__(self, pool: ThreadPoolExecutor | None = None, workers: int = 1) -> None:
        self.pool, self.workers = pool, workers

    def ask(self, question: Callable[[Heads, torch.Tensor], Statistics], heads: Heads) -> Statistics:
        """The answer for all rows; a question is told which of them it gets."""
        answers = self._share(question, heads)
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}

    def draw(self, null: str, heads: Heads, dice: Dice) -> Heads:
        """Chance for all rows."""
        parts = self._share(lambda part, rows: NULLS[null](part, dice[rows]), heads)
        q, k, v = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
        return heads._replace(q=q, k=k, v=v)

    def _share(self, work: Callable[[Heads, torch.Tensor], T], heads: Heads) -> list[T]:
        rows = torch.arange(len(heads.q), device=heads.q.device)
        if self.pool is None or heads.q.device.type != "cpu" or len(rows) < 2:
            return [work(heads, rows)]
        quiet = torch.no_grad()(work)  # whether gradients are kept is a matter of each thread
        return list(self.pool.map(lambda own: quiet(rows_of(heads, own), own), rows.chunk(self.workers)))


@contextmanager
def threads() -> Iterator[Threads]:
    """Workers for a while, each with one thread as PyTorch itself meanwhile; afterwards it has its threads again."""
    workers = torch.get_num_threads()
    if workers == 1:
        yield Threads()
        return
    try:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Threads(pool, workers)
    finally:
        torch.set_num_threads(workers)
