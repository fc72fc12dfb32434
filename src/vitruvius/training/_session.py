"""Everything one training run works with, made from its recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius.data import Loader, Mixer, make_mixup
from vitruvius.data.identity import Identity, identity_of
from vitruvius.models import PixelModel
from vitruvius.surgery import inner
from vitruvius.tasks import BatchDraws, Objective
from vitruvius.training import _build as make
from vitruvius.training._fast.session_step import FastStep
from vitruvius.training._guards.means import Means
from vitruvius.training._parallel import Replica, agree_on_statistics, bare, full_weights, share_out
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_RATE = 1e-3
ADAPTIVE = ("ada", "lamb")  # optimisers of these names take the square root unless told otherwise, as in timm


@dataclass(kw_only=True)
class Counters:
    """How far a run has come; every field is saved with the state and put back when the run resumes."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches of this epoch done
    updates: int = 0  # in the whole run
    elapsed: float = 0.0  # seconds of training in this epoch
    rate: float = 0.0  # learning rate of the last batch
    skipped: int = 0  # updates of this epoch that were left out
    best: float = float("-inf")  # accuracy of the best weights so far
    best_epoch: int = -1
    best_is_ema: bool = False  # whether the best weights are the running average
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics, one row per epoch
    alarms: int = 0
    rollbacks: int = 0
    group_nonfinite: bool = False  # whether a loss since the last update was not finite


@dataclass(kw_only=True)
class Session(Counters):
    """Model, task, data and optimisation of one run, beside how far it has come."""

    config: Config
    process: Process
    model: PixelModel
    task: Objective
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    train_loader: Loader
    val_loader: Loader
    mixer: Mixer | None
    num_epochs: int
    updates_per_epoch: int
    means: Means
    fast_step: FastStep | None  # by compiled blocks and recorded steps, where that is safe
    data_identity: dict[str, Identity]  # of the images trained on, and of those held out
    replica: Replica | None  # where weights are shared out among processes: a whole copy to look at

    @property
    def careful(self) -> bool:
        """Whether looking at every loss costs nothing: alone on a CPU."""
        alone = self.process.world_size == 1 and self.process.device.type == "cpu"
        return alone and self.config.train.nonfinite == "stop"

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS.get(self.config.train.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.process.device.type, dtype)

    def eval_model(self, *, ema: bool = False) -> nn.Module:
        """The module to look at, whole and unwrapped. Every process must ask."""
        wrapped = self.wrapped(ema=ema)
        if self.replica is None:
            return wrapped
        return self.replica.like(wrapped)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The whole weights under their own names. Every process must ask."""
        wrapped = inner(self.wrapped(ema=ema))
        if self.replica is None:
            return wrapped.state_dict()
        return full_weights(wrapped)

    def agree_on_statistics(self) -> None:
        """Make the running statistics of batch norms the same everywhere. Every process must ask."""
        how = self.config.train.dist_bn
        agree_on_statistics(self.wrapped(), how, self.process)
        if self.task.has_ema():
            agree_on_statistics(self.wrapped(ema=True), how, self.process)

    def wrapped(self, *, ema: bool = False) -> nn.Module:
        """The module that is trained (or its average), out of DDP and the compiler."""
        return bare(self.task, ema=ema)


def open_session(
    config: Config, process: Process, *, fresh: bool = True, tell: Callable[[str], None] = logger.info
) -> Session:
    """Data first, since it may be missing; then the model, the task and the optimiser.

    A `fresh` session has no state to go on from: what is fitted to the data before training is fitted now. `tell` is
    given a line when the data is found, one when the model is built, and one about every site that is fitted; they go
    to the log by default.
    """
    config = with_rate(config, process.world_size)
    loaders = make.loaders(config, process)
    tell(_describe_data(config, loaders))
    config = make.with_classes(config, loaders[0].num_classes)
    model = make.model(config, process)
    tell(_describe_model(config, model, process))
    config = make.with_statistics(config, model)
    if fresh:
        make.calibrate(model, loaders[0], process, tell)
    task = make.task(config, model)
    task.draws = BatchDraws(process.rank, process.world_size)
    task.to(process.device)
    if config.train.model_ema:
        together = config.train.parallel != "fsdp"  # sharded weights and whole buffers are averaged one by one
        task.setup_ema(decay=config.train.model_ema_decay, use_warmup=config.train.model_ema_warmup, foreach=together)
    replica = share_out(task, config, process)
    optimizer = make.optimizer(config, model, task)
    updates = make.updates_per_epoch(config, loaders[0], task)
    scheduler, num_epochs = make.scheduler(config, optimizer, updates)
    make.wrap(task, model, config, process)
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
        updates_per_epoch=updates,
        means=Means(process),
        fast_step=None,
        data_identity=process.on_first(lambda: _identify(config, loaders)),
        replica=replica,
    )


def _identify(config: Config, loaders: tuple[Loader, Loader]) -> dict[str, Identity]:
    role = "validation images"
    if config.train.holdout:
        role = "held-out images"
    return {"training images": identity_of(loaders[0]), role: identity_of(loaders[1])}


def _describe_data(config: Config, loaders: tuple[Loader, Loader]) -> str:
    """`data digits: 1,294 images to train on, 143 held out, 10 classes`."""
    train, judged = loaders
    role = "for validation"
    if config.train.holdout:
        role = "held out"
    images = f"{train.num_images:,} images to train on, {judged.num_images:,} {role}"
    return f"data {config.data.dataset}: {images}, {train.num_classes:,} classes"


def _describe_model(config: Config, model: nn.Module, process: Process) -> str:
    """`model vitruvius/vit_digits: 102,634 parameters on cuda, ddp in a group of 2 by nccl`."""
    parameters = sum(p.numel() for p in model.parameters())
    text = f"model {config.model.name}: {parameters:,} parameters on {process.device}"
    if process.grouped:
        text += f", {config.train.parallel} in a group of {process.world_size} by {torch.distributed.get_backend()}"
    return text


def with_rate(config: Config, world_size: int) -> Config:
    """The recipe with its learning rate as a number: given, or scaled from a base rate to the global batch.

    Linear: Goyal et al. 2017, arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997. The global batch is
    images per process × processes × accumulated batches.
    """
    train = config.train
    if train.lr_base is None:
        if train.lr is not None:
            return config
        return replace(config, train=replace(train, lr=DEFAULT_RATE))
    batch = config.data.batch_size * world_size * train.grad_accum_steps
    rule = train.lr_base_scale or _usual_scaling(train.opt)
    ratio = batch / train.lr_base_size
    if rule == "sqrt":
        ratio = math.sqrt(ratio)
    rate = train.lr_base * ratio
    if train.lr is not None and not math.isclose(train.lr, rate, rel_tol=1e-9):
        raise ConfigError(
            f"train.lr = {train.lr}, but train.lr_base = {train.lr_base} means {rate:.6g} for a global batch of "
            f"{batch} ({rule}, base {train.lr_base_size}). Give one of the two."
        )
    logger.debug("learning rate %.6g: %s from %g at %d to %d", rate, rule, train.lr_base, train.lr_base_size, batch)
    return replace(config, train=replace(train, lr=rate, lr_base_scale=rule))


def _usual_scaling(opt: str) -> Literal["linear", "sqrt"]:
    """As in timm: the square root for Adam's and LAMB's kin, linear for others."""
    if any(name in opt.lower() for name in ADAPTIVE):
        return "sqrt"
    return "linear"
