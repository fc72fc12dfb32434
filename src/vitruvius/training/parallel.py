"""Several processes: weights sharded by FSDP2, and batch norms that agree.

Sharding is FSDP2's `fully_shard` on every block (Zhao et al. 2023, arXiv:2304.11277), with whole copies to evaluate and
to save; DDP, the default, needs none of it. Batch norms gather running statistics from the images of their own process;
before an evaluation they are made equal, so that what is logged is what is saved.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d, convert_sync_batchnorm
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius.surgery.base import inner
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(task: TrainingTask, config: Config, process: Process) -> nn.Module | None:
    """Shard the task's model, and its average; a whole copy of it on every process, for evaluations.

    In those processes look at different numbers of images, so sharded models would wait for each other. None, and
    nothing is done, where the recipe does not ask, or there is no group.
    """
    if config.train.parallel != "fsdp" or not process.grouped:
        return None
    if config.train.clip_mode == "agc" and config.train.clip_grad is not None:
        raise ConfigError("train.clip_mode = agc looks at whole rows of weights; with train.parallel = fsdp use norm.")
    model, trained = bare(task), task.get_trainable_module()
    if trained is not None and len(list(trained.parameters())) > len(list(model.parameters())):
        raise ConfigError("the task trains weights beside the model's; with it use train.parallel=ddp.")
    replica = copy.deepcopy(model)
    _shard_blocks(model, process)
    if task.has_ema():
        _shard_blocks(bare(task, ema=True), process)
    return replica


def bare(task: TrainingTask, *, ema: bool = False) -> nn.Module:
    """The model that is trained (or its average), out of DDP and the compiler."""
    module: Any = task.get_eval_model(ema=ema)
    for name in ("module", "_orig_mod", "module"):  # EMA or DDP, compile
        module = getattr(module, name, module)
    assert isinstance(module, nn.Module)
    return module


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """A sharded model's whole weights on the first process, nothing on the others. Every process must call this."""
    weights: dict[str, Any] = dcp.get_model_state_dict(model, options=WHOLE)
    return weights


def save_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None, folder: Path
) -> dict[str, Any]:
    """Each process writes what it holds of weights, optimiser and average; what is no tensor is returned.

    Files are safetensors, which any number of processes can read. Every process must call this.
    """
    tensors, rest = _shards_of(model, optimizer, average)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a process alone is alone
        save_distributed(tensors, storage_writer=writer)
    return rest


def load_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None, folder: Path, rest: dict[str, Any]
) -> None:
    """Put back what `save_shards` has written and returned, whichever processes did. Every process must call this."""
    tensors, _ = _shards_of(model, optimizer, average)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load_distributed(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    dcp.set_model_state_dict(model, tensors["model"])
    if average is not None:
        dcp.set_model_state_dict(average, tensors["average"])
    state = {name: {**tensors["optimizer"].get(name, {}), **values} for name, values in rest["state"].items()}
    whole: dict[str, Any] = {"state": state, "param_groups": rest["param_groups"]}
    dcp.set_optimizer_state_dict(model, optimizer, whole)
    for group, saved in zip(optimizer.param_groups, rest["param_groups"], strict=True):  # pairs came back as lists
        group.update({key: value for key, value in saved.items() if key != "params"})


def _shards_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This process's part of all tensors, and the optimiser's settings and numbers by the names of the weights."""
    whole: dict[str, Any] = dict(dcp.get_optimizer_state_dict(model, optimizer))
    state = whole["state"]
    parts = {name: {k: v for k, v in values.items() if isinstance(v, Tensor)} for name, values in state.items()}
    rest = {name: {k: v for k, v in values.items() if not isinstance(v, Tensor)} for name, values in state.items()}
    tensors = {"model": dcp.get_model_state_dict(model), "optimizer": parts}
    if average is not None:
        tensors["average"] = dcp.get_model_state_dict(average)
    return tensors, {"state": rest, "param_groups": whole["param_groups"]}


def synchronise_batch_norms(model: nn.Module) -> None:
    """`train.sync_bn`: in training, batch norms use the statistics of all processes' images; in place."""
    if not batch_norms(model):
        logger.warning("train.sync_bn = true, but the model has no batch norms.")
    elif device_of(model).type != "cpu":
        convert_sync_batchnorm(model)
    else:
        for module in model.modules():
            if isinstance(module, BatchNormAct2d):
                module.__class__ = PlainSyncAct
            elif isinstance(module, _BatchNorm):
                module.__class__ = PlainSync


class PlainSync(_BatchNorm):
    """Synchronised batch norm in plain operations, for processors: PyTorch's own runs on accelerators alone."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        count = _Total.apply(input.new_tensor(float(input.numel() // input.shape[1])))
        mean = _Total.apply(input.sum(axes)) / count  # (C,)
        centred = input - _channels(mean, input)
        variance = _Total.apply(centred.square().sum(axes)) / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        output = centred * _channels((variance + self.eps).rsqrt(), input)
        if self.affine:
            output = output * _channels(self.weight, input) + _channels(self.bias, input)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        """Images and tokens alike."""

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # without one a plain mean over all batches
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)


class PlainSyncAct(PlainSync):
    """The same with timm's dropout and activation behind it."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class _Total(torch.autograd.Function):
    """The sum over all processes; its gradient is summed likewise."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        summed = value.clone()
        torch.distributed.all_reduce(summed)
        return summed.clone()  # Dynamo of torch 2.11 loses the gradient of an output that was written in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Total.forward(ctx, grads[0].contiguous())


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """(C,) in the second axis of `like`."""
    return values.view(1, -1, *[1] * (like.ndim - 2))


def batch_norms(model: nn.Module) -> list[_NormBase]:
    """Every norm of a model that gathers running statistics."""
    return [module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None]


def statistics_of(model: nn.Module) -> list[Tensor]:
    """The running statistics of a model's batch norms, in the order of its modules: themselves, not copies."""
    return [buffer for norm in batch_norms(model) for buffer in norm.buffers(recurse=False)]


@torch.no_grad()
def load_statistics(model: nn.Module, values: list[Tensor]) -> None:
    """Put back what was copied from `statistics_of`."""
    for buffer, value in zip(statistics_of(model), values, strict=True):
        buffer.copy_(value)


@torch.no_grad()
def agree_on_statistics(model: nn.Module, how: str, process: Process) -> None:
    """`train.dist_bn`: the same running statistics on every process, their mean or the first one's; in place."""
    statistics = [buffer for buffer in statistics_of(model) if buffer.is_floating_point()]
    if how == "none" or not process.grouped or not statistics:
        return
    flat = torch.cat([buffer.flatten().double() for buffer in statistics])
    if how == "reduce":
        flat = process.total(flat) / process.world_size
    else:
        torch.distributed.broadcast(flat, src=0)
    parts = flat.split([buffer.numel() for buffer in statistics])
    for buffer, part in zip(statistics, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def _shard_blocks(model: nn.Module, process: Process) -> None:
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
