"""One process or many: rank, device and the few collective operations we need, under torchrun or alone."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from vitruvius._errors import ConfigError, VitruviusError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among its peers, and the device it computes on."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    grouped: bool = False  # whether there is a process group, perhaps of one: then every collective goes through it

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share_of(self, number: int) -> int:
        """How many of `number` images are this process's: they are shared out round-robin."""
        return len(range(self.rank, number, self.world_size))

    def gather(self, value: Any) -> list[Any]:
        """One value of every process, in rank order, on every process."""
        if not self.grouped:
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
        if not self.grouped:
            return value
        said = [value if self.first else None]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says so; waits for all of them."""
        if not self.grouped:
            return flag
        return bool(self.total(torch.tensor([float(flag)], device=self.device)).item())

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        summed = numbers.clone()
        if self.grouped:
            dist.all_reduce(summed)
        return summed


@contextlib.contextmanager
def process_group(device: str = "auto") -> Iterator[Process]:
    """Join the process group that torchrun announces, and leave it; a group that exists is used; else one process.

    torchrun announces one for a single process too: what is tried with one is what many run.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local_rank)
    if chosen.index is not None and chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)  # where collectives of objects put their bytes
    announced = int(os.environ.get("WORLD_SIZE", 1)) > 1 or dist.is_torchelastic_launched()
    began = announced and not dist.is_initialized()
    if began:
        store, rank, world_size = _meeting_place()
        part = dist.PrefixStore(str(next(_GROUPS)), store)  # type: ignore[attr-defined]
        dist.init_process_group(_backend_for(chosen), store=part, rank=rank, world_size=world_size)
    group: dict[str, Any] = {}
    if dist.is_initialized():
        group = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "grouped": True}
    try:
        yield Process(device=chosen, **group)
    finally:
        if began:
            dist.destroy_process_group()


def _backend_for(device: torch.device) -> str:
    """PyTorch's choice for the device, such as NCCL; gloo where processes share one device, which NCCL refuses."""
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cpu" and neighbours > torch.accelerator.device_count():
        logger.warning(
            "%d processes share %d %s device(s) and talk by gloo, which is slow; start one process per device.",
            neighbours,
            torch.accelerator.device_count(),
            device.type,
        )
        return "gloo"
    return dist.get_default_backend_for_device(device)


_GROUPS = itertools.count(1)


@functools.cache
def _meeting_place() -> tuple[Any, int, int]:
    """Store, rank and number of the processes, for the life of this one.

    A second store at the address of the first may be taken for it while that one is going down: one process of two
    then waits for ever. Every group gets a part of one store instead.
    """
    store, rank, world_size = next(rendezvous("env://"))
    name = _agreed_name(store, rank, world_size)
    return dist.PrefixStore(name, store), rank, world_size  # type: ignore[attr-defined]


def _agreed_name(store: Any, rank: int, world_size: int) -> str:
    """A name that only processes of this attempt know.

    When torchrun starts processes again after one has died, its store still holds the addresses of the dead ones, who
    would be waited for. So the first process answers every other one by a word that this one has just made up.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"here is {rank}", own)
        name: str = store.get(f"answer to {own}").decode()  # waits
        store.set(f"{name} has {rank}", "")
        return name
    missing = set(range(1, world_size))
    while missing:
        for other in missing:  # it may be a dead one who is answered first
            store.set(f"answer to {store.get(f'here is {other}').decode()}", own)
        time.sleep(0.01)
        missing = {other for other in missing if not store.check([f"{own} has {other}"])}
    return own


def choose_device(wanted: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto`: the accelerator PyTorch finds, else the CPU; or a device by name. Without a number, each rank its own."""
    if wanted == "auto":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        try:
            device = torch.device(wanted)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            advice = "Use device=auto or device=cpu."
            raise ConfigError(f"device {wanted!r} cannot be used here: {reason} {advice}") from None
    index: Any = device.index  # None where no number was given, which torch's types do not say
    if device.type == "cpu":
        keep_memory()
        return device
    number = torch.get_device_module(device).device_count() if index is None else 1
    return device if number == 1 else torch.device(device.type, local_rank % number)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def keep_memory() -> None:
    """Have the C library keep freed memory instead of giving it back after each batch, which doubles the time on a CPU.

    glibc raises both its limits when a larger block than before is freed, up to 32 MiB; other libraries do not mind.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)
