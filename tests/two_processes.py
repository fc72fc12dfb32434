"""Run a function in two processes that know of each other as torchrun would tell them."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def in_two_processes(work: Callable[..., None], *arguments: Any) -> None:
    """`work(rank, *arguments)` in both, forked; an error in either is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        mp.start_processes(_enter, args=(port, work, arguments), nprocs=2, start_method="fork")


def _enter(rank: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    work(rank, *arguments)
