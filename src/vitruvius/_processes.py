"""One process or many: rank, device and the few collective operations we need, under torchrun or alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vitruvius._errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among its peers, and the device it computes on."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """One value of every process, in rank order, on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        return self.gather(value)[0]

    def wait(self) -> None:
        """Until all have come this far."""
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def joined(device: str = "auto") -> Iterator[Process]:
    """Join the process group that torchrun announces, and leave it; without torchrun, one process."""
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device, local_rank)
    began = world_size > 1 and not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Process(device=chosen, rank=rank, local_rank=local_rank, world_size=world_size)
    finally:
        if began:
            dist.destroy_process_group()


def choose_device(wanted: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto`: the accelerator PyTorch finds, else the CPU; or a device by name."""
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            return torch.device("cpu")
        return torch.device(found.type, local_rank) if torch.accelerator.device_count() > 1 else found
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {wanted!r} cannot be used here: {reason} Use device=auto or device=cpu.") from None
    return device
