"""Everything one training run works with, made from its recipe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.task import TrainingTask
from torch import nn

from vitruvius._processes import Process
from vitruvius.data import Loader, Mixer, make_mixup
from vitruvius.models import PixelModel
from vitruvius.training import _makers as make
from vitruvius.training.config import Config

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Session:
    """Model, task, data and optimisation of one run, and how far it has come."""

    config: Config
    process: Process
    model: PixelModel
    task: TrainingTask
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    train_loader: Loader
    val_loader: Loader
    mixer: Mixer | None
    num_epochs: int
    epoch: int = 0
    updates: int = 0
    best: float = float("-inf")
    best_epoch: int = -1
    best_is_ema: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS.get(self.config.train.precision)
        return torch.autocast(self.process.device.type, dtype) if dtype else nullcontext()

    def eval_model(self, *, ema: bool = False) -> nn.Module:
        """The module to evaluate and to save, unwrapped."""
        wrapped: Any = self.task.get_trainable_module(ema=ema)
        for name in ("module", "_orig_mod", "module"):  # EMA or DDP, compile
            wrapped = getattr(wrapped, name, wrapped)
        assert isinstance(wrapped, nn.Module)
        return wrapped


def open_session(config: Config, process: Process) -> Session:
    """Data first, since it may be missing; then the model, the task and the optimiser."""
    loaders = make.loaders(config, process)
    config = make.with_classes(config, loaders[0].num_classes)
    model = make.model(config, process)
    config = make.with_statistics(config, model)
    task = make.task(config, model)
    task.to(process.device)
    optimizer = make.optimizer(config, model)
    updates = -(-len(loaders[0]) // config.train.grad_accum_steps)  # in an epoch; the last may see fewer batches
    scheduler, num_epochs = make.scheduler(config, optimizer, updates)
    make.wrap(task, config, process)
    return Session(
        config=config,
        process=process,
        model=model,
        task=task,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.train.precision == "fp16"),
        train_loader=loaders[0],
        val_loader=loaders[1],
        mixer=make_mixup(config.data, model.num_classes, seed=config.seed, rank=process.rank),
        num_epochs=num_epochs,
    )
