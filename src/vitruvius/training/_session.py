"""Everything one training run works with, made from its recipe."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from torch import nn

from vitruvius._config import bind, split_use
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius.data import Loader, Mixer, eval_loader, held_out, make_mixup, train_loader
from vitruvius.models import PixelModel, create_from_config, create_model
from vitruvius.surgery import inner
from vitruvius.tasks import tasks
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
    loaders = make_loaders(config, process)
    config = with_classes(config, loaders[0].num_classes)
    model = create_from_config(config.model, config.attention, init=config.init, seed=config.seed)
    config = with_statistics(config, model)
    model.to(process.device)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.train.grad_checkpointing:
        model.model.set_grad_checkpointing()  # type: ignore[operator]
    task = make_task(config, model)
    task.to(process.device)
    optimizer = make_optimizer(config, model)
    updates = -(-len(loaders[0]) // config.train.grad_accum_steps)  # in an epoch; the last may see fewer batches
    scheduler, num_epochs = make_scheduler(config, optimizer, updates)
    if config.train.model_ema:
        task.setup_ema(decay=config.train.model_ema_decay)
    if config.train.compile:
        compile_task(task, config.train.compile)
    if process.world_size > 1:
        task.prepare_distributed(device_ids=[process.device] if process.device.type != "cpu" else None)
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
        mixer=make_mixup(config.data, loaders[0].num_classes, seed=config.seed, rank=process.rank),
        num_epochs=num_epochs,
    )


def preprocessing(config: Config) -> dict[str, Any]:
    """Input size, interpolation and crop of the model, learned without allocating it."""
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.kwargs)
    return model.data_config


def with_classes(config: Config, num_classes: int) -> Config:
    """The recipe with the data's number of classes, unless it names one itself."""
    named = config.model.kwargs.get("num_classes")
    if named is None:
        kwargs = {**config.model.kwargs, "num_classes": num_classes}
        return replace(config, model=replace(config.model, kwargs=kwargs))
    if named < num_classes:
        raise ConfigError(f"model.kwargs.num_classes = {named}, but {config.data.dataset} has {num_classes} classes.")
    return config


def with_statistics(config: Config, model: PixelModel) -> Config:
    """The recipe with the normalisation that the model really uses: it is not in the weights."""
    mean, std = model.statistics
    return replace(config, model=replace(config.model, mean=mean, std=std))


def make_loaders(config: Config, process: Process) -> tuple[Loader, Loader]:
    """Training images, and those that choose the best weights: a held-out part, or the validation split."""
    shares: dict[str, Any] = {
        "input_size": preprocessing(config),
        "rank": process.rank,
        "world_size": process.world_size,
        "device": process.device,
    }
    data, holdout = config.data, config.train.holdout
    chosen = held_out(data, holdout, seed=config.seed) if holdout else None
    train = train_loader(data, seed=config.seed, exclude=chosen, **shares)
    split = None if chosen is None else data.train_split
    return train, eval_loader(data, split=split, only=chosen, **shares)


def make_task(config: Config, model: nn.Module) -> TrainingTask:
    """The objective the recipe names; label smoothing is the data's unless the task says otherwise."""
    name, settings = split_use(config.task, where="task")
    maker = tasks[name]
    if "smoothing" in inspect.signature(maker).parameters:
        settings.setdefault("smoothing", config.data.smoothing)
    return maker(model, **bind(name, maker, settings, where="task"))


def compile_task(task: TrainingTask, how: bool | str) -> None:
    """torch.compile; `how` may name its backend."""
    try:
        task.compile(backend=how if isinstance(how, str) else "inductor")
    except Exception as error:  # nothing is compiled yet: only the backend can be wrong
        raise ConfigError(f"train.compile = {how!r} is no backend of torch.compile: {error}") from error


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """timm's optimiser of that name, with its parameter groups (no weight decay on vectors)."""
    train = config.train
    extras = {"eps": train.opt_eps, "betas": train.opt_betas}
    try:
        return create_optimizer_v2(
            inner(model),
            opt=train.opt,
            lr=train.lr,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            layer_decay=train.layer_decay,
            **{key: value for key, value in extras.items() if value is not None},
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"train.opt = {train.opt!r} cannot be made: {error}") from error


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates: int) -> tuple[Any, int]:
    """timm's scheduler, moved by every update (plateau: every epoch); and the number of epochs, cool-down included."""
    train = config.train
    return create_scheduler_v2(
        optimizer,
        sched=train.sched,
        num_epochs=train.epochs,
        warmup_epochs=train.warmup_epochs,
        warmup_lr=train.warmup_lr,
        min_lr=train.min_lr,
        cooldown_epochs=train.cooldown_epochs,
        decay_epochs=train.decay_epochs,
        decay_milestones=list(train.decay_milestones),
        decay_rate=train.decay_rate,
        patience_epochs=train.patience_epochs,
        step_on_epochs=train.sched == "plateau",
        updates_per_epoch=updates,
    )
