"""One process or many: rank, device and the few collective operations we need, under torchrun or alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from vitruvius._errors import ConfigError, VitruviusError

T = TypeVar("T")


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

    def on_first(self, work: Callable[[], T]) -> T:
        """Done by the first process alone, while the others wait; its result, or its error, on all of them."""
        value, error = None, None
        if self.first:
            try:
                value = work()
            except VitruviusError as raised:
                error = raised
        value, error = self.broadcast((value, error))
        if error is not None:
            raise error
        return value

    def broadcast(self, value: Any) -> Any:
        """What the first process says, on all of them."""
        if self.world_size == 1:
            return value
        said = [value if self.first else None]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says so; waits for all of them."""
        if self.world_size == 1:
            return flag
        return bool(self.total(torch.tensor([float(flag)], device=self.device)).item())

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        summed = numbers.clone()
        if self.world_size > 1:
            dist.all_reduce(summed)
        return summed


@contextlib.contextmanager
def process_group(device: str = "auto") -> Iterator[Process]:
    """Join the process group that torchrun announces, and leave it; a group that exists is used; else one process."""
    local_rank, announced = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device, local_rank)
    if chosen.index is not None and chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)  # where collectives of objects put their bytes
    began = announced > 1 and not dist.is_initialized()
    if began:
        _begin_group(dist.get_default_backend_for_device(chosen))
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        yield Process(device=chosen, rank=rank, local_rank=local_rank, world_size=world_size)
    finally:
        if began:
            dist.destroy_process_group()


class _Meeting:
    """Where the processes meet, for the life of this one.

    A second store at the address of the first may be taken for it while that one is going down: one process of two
    then waits for ever. Every group gets a part of one store instead.
    """

    store: ClassVar[Any] = None
    rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1
    groups: ClassVar[int] = 0


def _begin_group(backend: str) -> None:
    if _Meeting.store is None:
        _Meeting.store, _Meeting.rank, _Meeting.world_size = next(rendezvous("env://"))
    _Meeting.groups += 1
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"vitruvius {_Meeting.groups}", _Meeting.store
    )
    dist.init_process_group(backend, store=store, rank=_Meeting.rank, world_size=_Meeting.world_size)


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
