"""Rewired models train under DistributedDataParallel: two processes, one gradient."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from families import FAMILIES
from vitruvius._errors import SurgeryError
from vitruvius.surgery import rewire, survey


def run(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, x = FAMILIES[0].randomised()
    rewire(model, "softmax")
    parallel = DistributedDataParallel(model)
    parallel(x[rank : rank + 1]).square().mean().backward()
    torch.save([p.grad for p in model.parameters()], Path(folder) / f"{rank}.pt")
    with pytest.raises(SurgeryError, match="VisionTransformer is wrapped in DistributedDataParallel"):
        rewire(parallel, "softmax")
    assert len(survey(parallel)) == 2
    dist.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(port, str(tmp_path)), nprocs=2)
    model, x = FAMILIES[0].randomised()
    rewire(model, "softmax")(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-6, rtol=1e-5)
    assert isinstance(model, nn.Module)
