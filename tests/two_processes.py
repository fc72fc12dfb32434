"""Run a function in one or two processes that know of each other as torchrun would tell them."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def in_two_processes(work: Callable[..., None], *arguments: Any, start: str = "fork") -> None:
    """`work(rank, *arguments)` in both; an error in either is raised here.

    start: fork; or spawn, slower, where autograd runs: it does not survive a fork after a test that has compiled.
    """
    _start(2, work, arguments, start)


def as_only_rank(work: Callable[..., None], *arguments: Any) -> None:
    """`work(0, *arguments)` in one process, forked, as under `torchrun --nproc-per-node 1`."""
    _start(1, work, arguments, "fork")


def _start(number: int, work: Callable[..., None], arguments: tuple[Any, ...], method: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        mp.start_processes(_enter, args=(number, port, work, arguments), nprocs=number, start_method=method)


def _enter(rank: int, number: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    work(rank, *arguments)
