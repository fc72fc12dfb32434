"""Weights shared out among processes: FSDP2's `fully_shard` on every block, whole copies to look at and to save.

Zhao et al. 2023, arXiv:2304.11277. DDP, the default, needs none of this: every process holds everything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius.surgery import inner
from vitruvius.training.config import Config

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Replica:
    """A whole model on every process: processes look at different numbers of images, and sharded ones would wait."""

    def __init__(self, model: nn.Module, process: Process) -> None:
        self.model, self.process = copy.deepcopy(model), process

    def like(self, sharded: nn.Module) -> nn.Module:
        """The copy with the weights of a sharded model."""
        state = self.process.broadcast(full_weights(sharded))
        self.model.load_state_dict(state)
        self.model.train(sharded.training)
        return self.model


def share_out(task: TrainingTask, config: Config, process: Process) -> Replica | None:
    """Shard the task's model, and its average; None where the recipe does not ask, or one process is alone."""
    if config.train.parallel != "fsdp" or process.world_size == 1:
        return None
    if config.train.clip_mode == "agc" and config.train.clip_grad is not None:
        raise ConfigError("train.clip_mode = agc looks at whole rows of weights; with train.parallel = fsdp use norm.")
    model = bare(task)
    _refuse_other_weights(task, model)
    replica = Replica(model, process)
    _shard(model, process)
    if task.has_ema():
        _shard(bare(task, ema=True), process)
    return replica


def _refuse_other_weights(task: TrainingTask, model: nn.Module) -> None:
    trained = task.get_trainable_module()
    if trained is not None and len(list(trained.parameters())) > len(list(model.parameters())):
        raise ConfigError("the task trains weights beside the model's; with it use train.parallel=ddp.")


def bare(task: TrainingTask, *, ema: bool = False) -> nn.Module:
    """The model that is trained (or its average), out of DDP and the compiler."""
    module: Any = task.get_eval_model(ema=ema)
    for name in ("module", "_orig_mod", "module"):  # EMA or DDP, compile
        module = getattr(module, name, module)
    assert isinstance(module, nn.Module)
    return module


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """A sharded model's whole weights on the first process, nothing on the others. Every process must ask."""
    weights: dict[str, Any] = dcp.get_model_state_dict(model, options=WHOLE)
    return weights


def full_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same for the optimiser, by the names of the weights."""
    return dcp.get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_full(model: nn.Module, weights: dict[str, Any]) -> None:
    """Give each process its part of whole weights."""
    dcp.set_model_state_dict(model, weights, options=WHOLE)


def load_full_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The same for the optimiser."""
    dcp.set_optimizer_state_dict(model, optimizer, state, options=WHOLE)
    for group in optimizer.param_groups:  # pairs come back as lists
        group.update({key: tuple(value) for key, value in group.items() if key != "params" and isinstance(value, list)})


def _shard(model: nn.Module, process: Process) -> None:
    """Each block of the outermost lists of blocks by itself, the rest as one."""
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for block in list(_blocks(inner(model))):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)
