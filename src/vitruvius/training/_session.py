"""Everything one training run works with, made from its recipe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn

from vitruvius._processes import Process
from vitruvius.data import Loader, Mixer, make_mixup
from vitruvius.models import PixelModel
from vitruvius.surgery import inner
from vitruvius.training import _makers as make
from vitruvius.training._calibration import calibrate
from vitruvius.training._means import Means
from vitruvius.training._parallel import Replica, bare, full_weights, share_out
from vitruvius.training._rates import with_rate
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
    means: Means
    replica: Replica | None = None  # where weights are shared out among processes: a whole copy to look at
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    updates: int = 0
    elapsed: float = 0.0  # seconds of training in this epoch
    rate: float = 0.0
    skipped: int = 0  # updates of this epoch that were left out
    best: float = float("-inf")
    best_epoch: int = -1
    best_is_ema: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    alarms: int = 0
    rollbacks: int = 0
    group_spoilt: bool = False  # a loss since the last update was no number

    @property
    def replays(self) -> int:
        """How often the task wants to see each batch."""
        return int(getattr(self.task, "replays", 1))

    @property
    def updates_per_epoch(self) -> int:
        return make.updates_per_epoch(self.config, self.train_loader, self.task)

    @property
    def careful(self) -> bool:
        """Whether looking at every loss costs nothing: alone on a CPU."""
        alone = self.process.world_size == 1 and self.process.device.type == "cpu"
        return alone and self.config.train.nonfinite == "stop"

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS.get(self.config.train.precision)
        return torch.autocast(self.process.device.type, dtype) if dtype else nullcontext()

    def eval_model(self, *, ema: bool = False) -> nn.Module:
        """The module to look at, whole and unwrapped. Every process must ask."""
        wrapped = self.wrapped(ema=ema)
        return wrapped if self.replica is None else self.replica.like(wrapped)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The whole weights under their own names. Every process must ask."""
        wrapped = inner(self.wrapped(ema=ema))
        return wrapped.state_dict() if self.replica is None else full_weights(wrapped)

    def wrapped(self, *, ema: bool = False) -> nn.Module:
        """The module that is trained (or its average), out of DDP and the compiler."""
        return bare(self.task, ema=ema)


def open_session(config: Config, process: Process, *, fresh: bool = True) -> Session:
    """Data first, since it may be missing; then the model, the task and the optimiser.

    A `fresh` session has no state to go on from: what is fitted to the data before training is fitted now.
    """
    config = with_rate(config, process.world_size)
    loaders = make.loaders(config, process)
    config = make.with_classes(config, loaders[0].num_classes)
    model = make.model(config, process)
    config = make.with_statistics(config, model)
    if fresh:
        calibrate(model, loaders[0], process)
    task = make.task(config, model)
    task.to(process.device)
    if config.train.model_ema:
        task.setup_ema(decay=config.train.model_ema_decay, use_warmup=config.train.model_ema_warmup)
    replica = share_out(task, config, process)
    optimizer = make.optimizer(config, model, task)
    scheduler, num_epochs = make.scheduler(config, optimizer, make.updates_per_epoch(config, loaders[0], task))
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
        means=Means(process),
        replica=replica,
    )
