"""What a training session is made of, piece by piece, each from its section of the recipe."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from torch import nn

from vitruvius._config import bind, split_use
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius.data import Loader, eval_loader, held_out, train_loader
from vitruvius.models import PixelModel, create_from_config, create_model
from vitruvius.surgery import inner
from vitruvius.tasks import tasks
from vitruvius.training.config import Config


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


def loaders(config: Config, process: Process) -> tuple[Loader, Loader]:
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


def model(config: Config, process: Process) -> PixelModel:
    """The recipe's model on this process's device."""
    model = create_from_config(config.model, config.attention, init=config.init, seed=config.seed)
    model.to(process.device)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.train.grad_checkpointing:
        try:
            model.model.set_grad_checkpointing()  # type: ignore[operator]
        except (AttributeError, AssertionError):
            raise ConfigError(f"train.grad_checkpointing = true, but {config.model.name} does not offer it.") from None
    return model


def task(config: Config, model: nn.Module) -> TrainingTask:
    """The objective the recipe names; label smoothing is the data's unless the task says otherwise."""
    name, settings = split_use(config.task, where="task")
    maker = tasks[name]
    if "smoothing" in inspect.signature(maker).parameters:
        settings.setdefault("smoothing", config.data.smoothing)
    return maker(model, **bind(name, maker, settings, where="task"))


def wrap(task: TrainingTask, config: Config, process: Process) -> None:
    """The running average, then the compiler, then the other processes, in the order that timm's tasks expect."""
    if config.train.model_ema:
        task.setup_ema(decay=config.train.model_ema_decay)
    if config.train.compile:
        compile_task(task, config.train.compile)
    if process.world_size > 1:
        task.prepare_distributed(device_ids=None if process.device.type == "cpu" else [process.device])


def compile_task(task: TrainingTask, how: bool | str) -> None:
    """torch.compile; `how` may name its backend."""
    try:
        task.compile(backend=how if isinstance(how, str) else "inductor")
    except Exception as error:  # nothing is compiled yet: only the backend can be wrong
        raise ConfigError(f"train.compile = {how!r} is no backend of torch.compile: {error}") from error


def optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
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


def scheduler(config: Config, optimizer: torch.optim.Optimizer, updates: int) -> tuple[Any, int]:
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
