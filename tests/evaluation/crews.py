"""Processes that evaluate together, as torchrun would start them, and that can be killed at any moment."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[..., None]  # work(*arguments), in every process of a crew


@contextmanager
def working(world_size: int, work: Work, *arguments: Any) -> Iterator[list[mp.Process]]:
    """Processes forked from this one; killed at the end of the block if they still live."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = mp.get_context("fork")
    places = [(rank, world_size, port) for rank in range(world_size)]
    crew = [fork.Process(target=_enter, args=(*place, work, arguments)) for place in places]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        for member in crew:
            member.start()
    try:
        yield crew
    finally:
        for member in crew:
            if member.is_alive():
                os.kill(member.pid, signal.SIGKILL)
            member.join()


def finish(world_size: int, work: Work, *arguments: Any) -> None:
    """Let them work to the end."""
    with working(world_size, work, *arguments) as crew:
        for member in crew:
            member.join(60)
        assert [member.exitcode for member in crew] == [0] * world_size


def kill(world_size: int, folder: Path, parts: int, after: float, work: Work, *arguments: Any) -> bool:
    """Pull the plug some moment after so many parts were written; whether there was still something to interrupt."""
    with working(world_size, work, *arguments) as crew:
        while sum(1 for _ in (folder / "parts").glob("*.safetensors")) < parts and crew[0].is_alive():
            time.sleep(0.002)
        time.sleep(after)
        return any(member.is_alive() for member in crew)


def _enter(rank: int, world_size: int, port: int, work: Work, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ |= places | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    work(*arguments)
